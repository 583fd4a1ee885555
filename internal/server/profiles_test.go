package server

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"
)

// TestOneProfileIsMadeAtATime: a profile stops all goroutines. Made at once, as many as there are connections left writes no time for 16 s.
func TestOneProfileIsMadeAtATime(t *testing.T) {
	h := mustStart(t)
	p := &h.endpoints.profiles
	p.patience = time.Millisecond
	paths := []string{"goroutine?debug=2", "heap", "allocs", "mutex", "symbol?0x1"}
	p.turn <- struct{}{}
	for _, path := range paths {
		if code, body := httpGet(t, h, "/debug/pprof/"+path); code != http.StatusServiceUnavailable {
			t.Errorf("%s beside another profile: %d, %.100q", path, code, body)
		}
	}
	<-p.turn
	p.patience = patience
	for _, path := range paths {
		if code, body := httpGet(t, h, "/debug/pprof/"+path); code != http.StatusOK {
			t.Errorf("%s: %d, %.100q", path, code, body)
		}
	}
}

// TestAProfileThatIsNotTakenEnds: a client that takes nothing of its profile keeps the next one waiting for a while only.
func TestAProfileThatIsNotTakenEnds(t *testing.T) {
	p := new(profiles)
	p.init()
	p.time = 20 * time.Millisecond
	ended := make(chan error, 1)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p.inTurn(w, r, func(w http.ResponseWriter, _ *http.Request) {
			_, err := w.Write(make([]byte, 64<<20)) // more than the buffers of both sockets
			ended <- err
		})
	}))
	defer s.Close()
	c, err := net.Dial("tcp", s.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: h\r\n\r\n")
	select {
	case err := <-ended:
		if err == nil {
			t.Error("64 MiB were written to a client that takes nothing")
		}
	case <-time.After(patience):
		t.Fatal("the profile does not end")
	}
	select {
	case p.turn <- struct{}{}:
	case <-time.After(patience):
		t.Fatal("the next profile has no turn")
	}
}

// TestNamesOfManyAddressesAreRefused: a request without an end for names of addresses took 800 MiB.
func TestNamesOfManyAddressesAreRefused(t *testing.T) {
	p := new(profiles)
	p.init()
	body := &countedReader{Reader: io.LimitReader(endless("0x1+"), 16<<20)}
	answer := httptest.NewRecorder()
	p.symbol(answer, httptest.NewRequest(http.MethodPost, "/debug/pprof/symbol", body))
	if body.bytes > 2*symbolBytesMax {
		t.Errorf("%d bytes were read", body.bytes)
	}
	if text := answer.Body.String(); !strings.Contains(text, "too large") {
		t.Errorf("%.100q does not say what is wrong", text)
	}
}

// endless is a text without an end.
type endless string

func (e endless) Read(p []byte) (int, error) {
	return copy(p, bytes.Repeat([]byte(e), len(p)/len(e)+1)), nil
}

type countedReader struct {
	io.Reader
	bytes int
}

func (r *countedReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	r.bytes += n
	return n, err
}

// TestATraceThatIsNotTakenEnds: the runtime keeps without a bound what the client of a trace has not taken.
func TestATraceThatIsNotTakenEnds(t *testing.T) {
	h := mustStart(t)
	h.endpoints.profiles.lag = -time.Second // the client has lagged already
	began := time.Now()
	r, err := http.NewRequestWithContext(testContext(t), http.MethodGet, "http://"+h.HTTPAddress()+"/debug/pprof/trace?seconds=20", nil)
	if err != nil {
		t.Fatal(err)
	}
	if answer, err := http.DefaultClient.Do(h.authorize(r)); err == nil {
		_, _ = io.Copy(io.Discard, answer.Body)
		_ = answer.Body.Close()
	}
	if took := time.Since(began); took > 15*time.Second {
		t.Errorf("a trace that cannot be written ended after %v", took)
	}
}

// TestATraceWaitsForItsClientForAWhile altogether, to which the time counts back in which there is nothing to write.
func TestATraceWaitsForItsClientForAWhile(t *testing.T) {
	client := &lateClient{ResponseRecorder: httptest.NewRecorder(), clock: time.Unix(1_000_000, 0)}
	w := &traceWriter{ResponseWriter: client, left: 5 * time.Second, most: 5 * time.Second, now: func() time.Time { return client.clock }, ended: client.clock}
	for i, c := range []struct{ pause, takes, wants time.Duration }{
		{time.Hour, 2 * time.Second, 5 * time.Second},
		{0, 2 * time.Second, 3 * time.Second},
		{time.Second, time.Second, 2 * time.Second},
		{0, 4 * time.Second, time.Second}, // fails
		{0, 0, 0},
	} {
		client.clock, client.takes = client.clock.Add(c.pause), c.takes
		began := client.clock
		if _, err := w.Write([]byte("part")); (err != nil) != (c.takes > c.wants) {
			t.Errorf("write %d: %v", i, err)
		}
		if got := client.deadline.Sub(began); got != c.wants {
			t.Errorf("write %d may take %v, not %v", i, got, c.wants)
		}
	}
}

// lateClient takes some time for each write.
type lateClient struct {
	*httptest.ResponseRecorder
	clock, deadline time.Time
	takes           time.Duration
}

func (c *lateClient) SetWriteDeadline(at time.Time) error {
	c.deadline = at
	return nil
}

func (c *lateClient) Write(p []byte) (int, error) {
	if c.clock = c.clock.Add(c.takes); c.clock.After(c.deadline) {
		c.clock = c.deadline
		return 0, os.ErrDeadlineExceeded
	}
	return len(p), nil
}
