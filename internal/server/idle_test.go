package server

import (
	"flag"
	"fmt"
	"io"
	"net"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"github.com/epochkv/epochkv/internal/config"
)

// idleConnections is about 10000 for the figure in docs/operations.md. Each takes two open files.
var idleConnections = flag.Int("idle.connections", 500, "how many connections TestIdleConnectionsTakeLittleMemory opens")

// idleConnectionBytesMax is what a connection may take of the heap and of stacks on the direct
// transport, the client's socket in the same process included.
const idleConnectionBytesMax = 12 << 10

// TestIdleConnectionsTakeLittleMemory: connections that have been used once, and do nothing, keep no
// buffers, and are served when they are used again.
func TestIdleConnectionsTakeLittleMemory(t *testing.T) {
	h := mustStart(t, withDirect, func(c *config.Config) {
		c.Limits.Connections = *idleConnections*4/3 + 10                         // one client leaves a quarter to others
		c.Memory = 256*config.MiB + config.Size(*idleConnections)*512*config.KiB // config counts 64 KiB for each, and bounds their sum
	})
	h.get(t, "warm")
	before := memoryInUse()
	clients := make([]idleClient, *idleConnections)
	forAll := func(do func(c *idleClient) error) {
		t.Helper()
		var all sync.WaitGroup
		for first := range 8 {
			all.Go(func() {
				for i := first; i < len(clients); i += 8 {
					if err := do(&clients[i]); err != nil {
						t.Errorf("connection %d: %v", i, err)
						return
					}
				}
			})
		}
		all.Wait()
		if t.Failed() {
			t.FailNow()
		}
	}
	forAll(func(c *idleClient) error { return c.dial(t, h.Address()) })
	each := func() int64 { return (memoryInUse() - before) / int64(len(clients)) }
	var last int64
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(50 * time.Millisecond) { // bursts end, stacks shrink
		if last = each(); last <= idleConnectionBytesMax {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d idle connections take %d bytes each, more than %d", len(clients), last, idleConnectionBytesMax)
		}
	}
	t.Logf("%d idle connections take %d bytes each", len(clients), last)
	forAll(func(c *idleClient) error { return c.ping(2) })
}

// memoryInUse is what the heap and the stacks of goroutines take.
func memoryInUse() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapInuse + m.StackInuse)
}

const frameTypePing = 6

// idleClient is a client that keeps nothing but its socket.
type idleClient struct{ net.Conn }

func (c *idleClient) dial(t *testing.T, address string) (err error) {
	if c.Conn, err = net.Dial("tcp", address); err != nil {
		return err
	}
	t.Cleanup(func() { _ = c.Close() })
	if _, err = c.Write(append([]byte(http2.ClientPreface), frame(4, 0, 0, nil)...)); err != nil {
		return err
	}
	return c.ping(1)
}

// ping sends a ping, and reads until its answer.
func (c *idleClient) ping(n byte) error {
	if err := c.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
		return err
	}
	if _, err := c.Write(frame(frameTypePing, 0, 0, []byte{0, 0, 0, 0, 0, 0, 0, n})); err != nil {
		return err
	}
	for {
		var b [256]byte
		if _, err := io.ReadFull(c, b[:frameHeaderBytes]); err != nil {
			return err
		}
		length := int(b[0])<<16 | int(b[1])<<8 | int(b[2])
		if length > len(b)-frameHeaderBytes {
			return fmt.Errorf("a frame of %d bytes", length)
		}
		kind, flags := b[3], b[4]
		if _, err := io.ReadFull(c, b[:length]); err != nil {
			return err
		}
		if kind == frameTypePing && flags&1 != 0 && b[7] == n {
			return nil
		}
	}
}
