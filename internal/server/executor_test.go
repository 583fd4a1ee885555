package server

import (
	"context"
	"testing"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// TestPooledExecutorsKeepNoHugeBuffers: what one huge request needed does not stay with the pool.
func TestPooledExecutorsKeepNoHugeBuffers(t *testing.T) {
	h := mustStart(t)
	c, err := h.takeExecutor()
	if err != nil {
		t.Fatal(err)
	}
	c.access = h.authorized(t, pb.KVService_Put_FullMethodName)
	c.write.Set([]byte("k"), make([]byte, 4*pooledBytesMax))
	if _, err := c.session.Commit(context.Background(), &c.write); err != nil {
		t.Fatal(err)
	}
	if held := c.write.Batch.MemoryBytes(); held <= pooledBytesMax {
		t.Fatalf("%d bytes are held during the request: this tests nothing", held)
	}
	c.release()
	if held := c.write.Batch.MemoryBytes(); held > pooledBytesMax {
		t.Errorf("the pool holds %d bytes of one executor", held)
	}
	c.write.Conditions = make([]mvcc.Condition, pooledBytesMax/8)
	c.forgetWrite()
	if n := cap(c.write.Conditions); n > 0 {
		t.Errorf("the pool holds room for %d conditions", n)
	}
}

// TestExecutorIsPooledWithItsSession: one pool has both, and a request that ends does not leave the function that counts
// its large values with the session.
func TestExecutorIsPooledWithItsSession(t *testing.T) {
	h := mustStart(t)
	c, err := h.takeExecutor()
	if err != nil {
		t.Fatal(err)
	}
	c.release()
	x, err := h.store.Session() // as UnchangedSince takes one for itself
	if err != nil {
		t.Fatal(err)
	}
	if x != c.session {
		t.Error("the session of the executor is not in the store's pool")
	}
	x.Close()
	again, err := h.takeExecutor()
	if err != nil {
		t.Fatal(err)
	}
	defer again.release()
	if again != c {
		t.Error("the session came back without its executor")
	}
}

// TestEachExecutorHasAContext: also one that no request has had yet.
func TestEachExecutorHasAContext(t *testing.T) {
	h := mustStart(t)
	for range 16 { // more than the pool has
		c, err := h.takeExecutor()
		must(t, err)
		defer c.release()
		if c.ctx == nil {
			t.Fatal("an executor has no context")
		}
	}
}
