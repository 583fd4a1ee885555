package peers

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/epochkv/epochkv/bench/harness"
)

// witness is a number that shows how often a server has synced.
type witness struct {
	name  string
	exact bool // it is the number of syncs, and not only at least that
	read  func(context.Context, *server) (float64, error)
}

// syncsByMetric is for servers that count their syncs.
func syncsByMetric(address func(place) string, counter string) *witness {
	return &witness{name: "syncs", exact: true, read: func(ctx context.Context, s *server) (float64, error) {
		return metric(ctx, address(s.place), counter)
	}}
}

// pagesWritten is for Redis, which does not count: after each sync, the next append makes a page of the file dirty anew.
var pagesWritten = witness{name: "pages written", read: func(_ context.Context, s *server) (float64, error) {
	const page = 4096
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/io", s.pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(text), "\nwrite_bytes: ")
	number, _, _ := strings.Cut(rest, "\n")
	bytes, err := strconv.ParseFloat(number, 64)
	return bytes / page, err
}}

// proof fails a run, in which so many commits were acknowledged, if the server did not sync as the arm's name says.
type proof func(r *harness.Run, commits int) error

// watch looks at the server's witness before a run; the proof looks again.
func (a arm) watch(ctx context.Context, s *server) (proof, error) {
	w := a.kind.witness
	if w == nil {
		return func(*harness.Run, int) error { return nil }, nil
	}
	began := time.Now()
	before, err := w.read(ctx, s)
	return func(r *harness.Run, commits int) error {
		after, err := w.read(ctx, s)
		if err != nil {
			return err
		}
		low, high := a.expected(r, commits, time.Since(began))
		return r.Prove(w.name, after-before, low, high)
	}, err
}

// asyncSyncsMax is far above the twenty syncs a second that asynchronous commits ask for.
const asyncSyncsMax = 100

// expected is how often a server has synced: a durable one for its commits, as one sync serves those in flight and no more. The
// other one has not.
func (a arm) expected(r *harness.Run, commits int, took time.Duration) (low, high float64) {
	exact := a.kind.witness.exact
	switch {
	case a.kind.durability == deferred && exact:
		return 0, asyncSyncsMax * (took.Seconds() + 1)
	case a.kind.durability == deferred, r.Smoke && !exact: // scratch in memory writes nothing to a disk, which a smoke run accepts
		return 0, math.Inf(1)
	}
	return float64(commits / a.load.inFlight(r.Point)), math.Inf(1)
}

// scraper asks over a new connection each time: the server may have been stopped for long.
var scraper = http.Client{Transport: &http.Transport{DisableKeepAlives: true}}

// notSentAtZero are the counters of the scenarios that a server does not send before they have counted something.
var notSentAtZero = []string{"kvserver_expired_keys_total", "kvserver_lease_keepalives_total", "kvserver_feed_events_total"}

// metric reads a number from a server's metrics page.
func metric(ctx context.Context, address, name string) (value float64, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/metrics", http.NoBody)
	if err != nil {
		return 0, err
	}
	response, err := scraper.Do(request)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, response.Body.Close()) }()
	for lines := bufio.NewScanner(response.Body); lines.Scan(); {
		if number, ok := strings.CutPrefix(lines.Text(), name+" "); ok {
			return strconv.ParseFloat(number, 64)
		}
	}
	if slices.Contains(notSentAtZero, name) {
		return 0, nil
	}
	return 0, fmt.Errorf("%s has no metric %s", address, name)
}
