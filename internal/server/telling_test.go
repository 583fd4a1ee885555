package server

import (
	"net"
	"sync"
	"testing"
)

// stuckConn takes nothing before it is released.
type stuckConn struct {
	net.Conn
	writes, release chan struct{}
}

func (c *stuckConn) Write(b []byte) (int, error) {
	c.writes <- struct{}{}
	<-c.release
	return len(b), nil
}

// TestRefusalsThatAreNotTakenHaveABound: the client sends requests that are refused, on ever new streams, and takes nothing of what it was sent before. It is
// not read on.
func TestRefusalsThatAreNotTakenHaveABound(t *testing.T) {
	in := newFollowed(t, newReceiving(64<<20))
	conn := &stuckConn{writes: make(chan struct{}, 10_000), release: make(chan struct{})}
	c := &countedConn{Conn: conn, inbound: in}
	waiting := func() int {
		c.mu.Lock()
		defer c.mu.Unlock()
		return len(in.telling)
	}
	var running sync.WaitGroup
	running.Go(func() {
		if _, err := c.Write(frame(frameData, 0, 1, []byte("answer"))); err != nil {
			t.Error(err)
		}
	})
	<-conn.writes
	const refused = 5000
	most := 0
	running.Go(func() {
		for i := range uint32(refused) {
			c.mu.Lock()
			in.tell(2*i+1, new(receivedStream), errOverloaded)
			c.noteEnding()
			most = max(most, len(in.telling))
			c.mu.Unlock()
			c.tell()
		}
	})
	eventually(t, "refusals wait", func() bool { return waiting() > tellingMax })
	close(conn.release)
	running.Wait()
	if most > tellingMax+1<<10 {
		t.Errorf("%d bytes of refusals waited", most)
	}
	if n := waiting(); n > 0 {
		t.Errorf("%d bytes were not sent", n)
	}
}
