package transport

import (
	"bytes"
	"io"
	"net"
	"runtime"
	"sync"
	"testing"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// readyConn always has the next bytes of what its client sends, until there is no more, and takes everything at once.
type readyConn struct {
	net.Conn
	sent io.Reader
}

func (c readyConn) Read(p []byte) (int, error)  { return c.sent.Read(p) }
func (c readyConn) Write(p []byte) (int, error) { return len(p), nil }

// turns notes whose requests are executed, in their order.
type turns struct {
	service
	mu    sync.Mutex
	order []int // of clients
}

type turnClient struct {
	client
	turns  *turns
	number int
}

func (c turnClient) Lane() Lane { return turnLane{lane{c.service}, c} }

type turnLane struct {
	lane
	client turnClient
}

func (l turnLane) Rest() {}

func (l turnLane) Execute(r Request, message []byte) {
	s := l.client.turns
	s.mu.Lock()
	s.order = append(s.order, l.client.number)
	s.mu.Unlock()
	l.lane.Execute(r, message)
}

// TestConnectionsThatAlwaysSendTakeTurns: of connections whose clients always have more requests, none has many executed while those of another one
// wait, on one processor. Frames that execute nothing are part of a turn, too.
func TestConnectionsThatAlwaysSendTakeTurns(t *testing.T) {
	t.Run("requests", func(t *testing.T) { takeTurns(t, 0, 4*burstMax) })
	t.Run("windows between them", func(t *testing.T) { takeTurns(t, 20, 8) })
}

// takeTurns has clients send requests, each after so many frames that execute nothing.
func takeTurns(t *testing.T, between, runMax int) {
	const clients, requests = 4, 5_000
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	s := &turns{service: service{release: make(chan struct{})}}
	server := &Server{options: testOptions(), service: s, services: testServices(), conns: map[*Conn]struct{}{}}
	server.watchdog.wake = make(chan struct{}, 1)
	var sent bytes.Buffer
	sent.WriteString(http2.ClientPreface)
	p := &peer{framer: http2.NewFramer(&sent, nil)}
	p.encoder = hpack.NewEncoder(&p.block)
	_ = p.framer.WriteSettings()
	_ = p.framer.WriteWindowUpdate(0, 1<<30) // for all answers
	for i := range uint32(requests) {
		for range between {
			_ = p.framer.WriteWindowUpdate(0, 1)
		}
		p.request(1+2*i, pathEcho, 10)
	}
	var all sync.WaitGroup
	for i := range clients {
		ours, theirs := net.Pipe()
		t.Cleanup(func() { _ = ours.Close() })
		c := newConn(server, readyConn{theirs, bytes.NewReader(sent.Bytes())})
		c.client = turnClient{client{&s.service}, s, i}
		all.Go(c.start)
	}
	all.Wait()
	// what comes before all have begun, and after one has ended, does not count
	begun, left, run, most := map[int]bool{}, [clients]int{}, 0, 0
	for i, client := range s.order {
		begun[client] = true
		if left[client]++; left[client] == requests {
			break
		}
		if i > 0 && len(begun) == clients && s.order[i-1] == client {
			run++
		} else {
			run = 1
		}
		most = max(most, run)
	}
	if len(s.order) != clients*requests || len(begun) != clients {
		t.Fatalf("%d requests of %d clients were executed", len(s.order), len(begun))
	}
	if most > runMax {
		t.Errorf("%d requests of a client were executed in a row while others had requests", most)
	}
}
