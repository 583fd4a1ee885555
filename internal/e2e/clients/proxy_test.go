package clients

import (
	"net"
	"sync"
	"sync/atomic"
	"testing"
)

// proxy is between client and server, and breaks connections after so many bytes from the server.
type proxy struct {
	endpoint string
	target   string
	budget   atomic.Int64 // bytes that a new connection lasts; 0: for ever
	broken   atomic.Int32 // connections it broke

	mu    sync.Mutex
	conns []net.Conn
}

func startProxy(t *testing.T, target string) *proxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{endpoint: listener.Addr().String(), target: target}
	var running sync.WaitGroup
	running.Go(func() {
		for {
			from, err := listener.Accept()
			if err != nil {
				return // closed below
			}
			running.Go(func() { p.serve(&running, from) })
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		p.cutAll()
		running.Wait()
	})
	return p
}

func (p *proxy) serve(running *sync.WaitGroup, from net.Conn) {
	to, err := net.Dial("tcp", p.target)
	if err != nil {
		_ = from.Close()
		return
	}
	p.mu.Lock()
	p.conns = append(p.conns, from, to)
	p.mu.Unlock()
	running.Go(func() { forward(to, from, 0) })
	if forward(from, to, p.budget.Load()) {
		p.broken.Add(1)
	}
}

// forward copies until either side ends, or budget bytes have passed. It closes both and returns
// whether the budget was used up.
func forward(to, from net.Conn, budget int64) (cut bool) {
	defer func() {
		_ = to.Close()
		_ = from.Close()
	}()
	buf := make([]byte, 4<<10)
	for passed := int64(0); budget == 0 || passed < budget; {
		n, err := from.Read(buf)
		if err != nil {
			return false
		}
		if _, err := to.Write(buf[:n]); err != nil {
			return false
		}
		passed += int64(n)
	}
	return true
}

// cutAll breaks every connection.
func (p *proxy) cutAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, conn := range p.conns {
		_ = conn.Close()
	}
	p.conns = nil
}
