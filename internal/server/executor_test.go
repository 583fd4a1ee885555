package server

import (
	"context"
	"testing"
)

// TestPooledCallersKeepNoHugeBuffers: what one huge request needed does not stay with the pool.
func TestPooledCallersKeepNoHugeBuffers(t *testing.T) {
	h := mustStart(t)
	c, err := h.executors.take()
	if err != nil {
		t.Fatal(err)
	}
	c.write.Set([]byte("k"), make([]byte, 4*pooledBytesMax))
	if _, err := c.session.Commit(context.Background(), &c.write); err != nil {
		t.Fatal(err)
	}
	if held := c.write.Batch.MemoryBytes(); held <= pooledBytesMax {
		t.Fatalf("%d bytes are held during the request: this tests nothing", held)
	}
	h.executors.release(c)
	if held := c.write.Batch.MemoryBytes(); held > pooledBytesMax {
		t.Errorf("the pool holds %d bytes of one executor", held)
	}
}
