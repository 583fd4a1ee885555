package server

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/testseed"
)

// cuttingProxy forwards connections to a server and closes each after it has brought so many bytes
// of answers.
type cuttingProxy struct {
	listener net.Listener
	target   string

	mu   sync.Mutex // guards rng and cuts
	rng  *rand.Rand
	most int // bytes
	cuts int

	connections sync.WaitGroup
}

func newCuttingProxy(t *testing.T, target string, most int, rng *rand.Rand) *cuttingProxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &cuttingProxy{listener: listener, target: target, most: most, rng: rng}
	p.connections.Go(p.run)
	t.Cleanup(func() { _ = listener.Close(); p.connections.Wait() })
	return p
}

func (p *cuttingProxy) run() {
	for {
		in, err := p.listener.Accept()
		if err != nil {
			return // the test is over
		}
		p.mu.Lock()
		bytes := 200 + p.rng.IntN(p.most)
		p.mu.Unlock()
		p.connections.Go(func() { p.forward(in, int64(bytes)) })
	}
}

func (p *cuttingProxy) forward(in net.Conn, bytes int64) {
	out, err := net.Dial("tcp", p.target)
	if err != nil {
		_ = in.Close()
		return
	}
	var both sync.WaitGroup
	both.Go(func() { _, _ = io.Copy(out, in); _ = out.Close() })
	n, _ := io.CopyN(in, out, bytes)
	_, _ = in.Close(), out.Close()
	both.Wait()
	if n == bytes {
		p.mu.Lock()
		p.cuts++
		p.mu.Unlock()
	}
}

// TestScanOverBreakingConnectionsIsOneSnapshot: the connection breaks after any number of bytes,
// again and again, while keys are put, overwritten and deleted. Each scan brings exactly what the
// store held at its epoch, in both directions, with and without a limit.
func TestScanOverBreakingConnectionsIsOneSnapshot(t *testing.T) {
	rng := rand.New(rand.NewPCG(testseed.Base(t), 7))
	h := mustStart(t, func(c *config.Config) { c.Retention = time.Minute })
	put := func(i int) {
		value := make([]byte, 1+rng.IntN(300))
		h.put(t, fmt.Sprintf("key-%04d", i), string(value))
	}
	for i := range 600 {
		put(i)
	}
	proxy := newCuttingProxy(t, h.Address(), 20<<10, rand.New(rand.NewPCG(rng.Uint64(), 1)))
	broken, err := client.Dial(proxy.listener.Addr().String(),
		h.clientOptions(client.WithRetry(client.Retry{Attempts: 50, Base: time.Millisecond, Max: 5 * time.Millisecond}))...)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = broken.Close() }()
	whole, err := client.Dial(h.Address(), h.clientOptions()...)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = whole.Close() }()
	for round := range 12 {
		o := client.ScanOptions{Reverse: round%2 == 1, PageBytes: uint32(1 + rng.IntN(4<<10))}
		if round%3 == 0 {
			o.Limit = uint64(1 + rng.IntN(500))
		}
		var got []client.Entry
		var at client.Epoch
		for page, err := range broken.Pages(t.Context(), client.Range{}, o) {
			if err != nil {
				t.Fatalf("round %d, %+v: %v", round, o, err)
			}
			if at != 0 && page.ReadEpoch != at {
				t.Fatalf("round %d: the scan goes on at epoch %d and began at %d", round, page.ReadEpoch, at)
			}
			at, got = page.ReadEpoch, append(got, page.Entries...)
			for range 3 {
				i := rng.IntN(700)
				put(i)
				if _, err := h.kv.Delete(context.Background(), &pb.DeleteRequest{Key: fmt.Appendf(nil, "key-%04d", (i*7)%700)}); err != nil {
					t.Fatal(err)
				}
			}
		}
		o.At, o.PageBytes = at, 0
		n := 0
		for want, err := range whole.Scan(t.Context(), client.Range{}, o) {
			if err != nil {
				t.Fatal(err)
			}
			if n >= len(got) || string(got[n].Key) != string(want.Key) || string(got[n].Value) != string(want.Value) || got[n].Epoch != want.Epoch {
				t.Fatalf("round %d, %+v: entry %d of %d differs from %q", round, o, n, len(got), want.Key)
			}
			n++
		}
		if n != len(got) {
			t.Fatalf("round %d: %d entries, want %d", round, len(got), n)
		}
	}
	proxy.mu.Lock()
	defer proxy.mu.Unlock()
	if proxy.cuts < 20 {
		t.Errorf("only %d connections were broken: the test proves little", proxy.cuts)
	}
	t.Logf("%d connections were broken", proxy.cuts)
}
