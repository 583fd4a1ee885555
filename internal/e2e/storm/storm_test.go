// Package storm runs every kind of load at once against the real server, including hostile ones,
// kills the server again and again, and checks its promises: no acknowledged write is lost, no
// batch is torn, no healthy client is delayed by another client, memory stays in its bound, and
// SIGTERM ends the process.
//
// A run of some seconds belongs to the ordinary tests. The long form:
//
//	go test ./internal/e2e/storm -v -timeout 45m -storm.duration 30m
package storm

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/storage/inspect"
)

var (
	duration  = flag.Duration("storm.duration", 4*time.Second, "how long the storm lasts, kills and checks not counted")
	transport = flag.String("storm.transport", string(config.Default().Transport), "the server's --transport")
	longest   = flag.Duration("storm.round", 0, "the longest time between two kills; 0: a third of the duration, 40 s at most")
	seedFlag  = flag.Uint64("storm.seed", 0, "replays a schedule, not the races; 0: from the clock")
)

const (
	startMax = 60 * time.Second
	stopMax  = 60 * time.Second

	memory = 128 << 20
)

func mustBuild(t *testing.T) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "kvserver")
	if out, err := exec.Command("go", "build", "-o", name, "github.com/epochkv/epochkv/cmd/kvserver").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	return name
}

// mustDir is a directory on a real disk, because on a memory file system a sync costs nothing.
func mustDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "epochkv-storm-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the data directory is kept: %s", dir)
			return
		}
		_ = os.RemoveAll(dir)
	})
	return dir
}

func TestStorm(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("replay the schedule (not the races) with -storm.seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	span := *longest
	if span == 0 {
		span = min(*duration/3, 40*time.Second)
	}
	binary, dir := mustBuild(t), mustDir(t)
	s, h := newStorm(t, seed), history{last: -1}
	for left := *duration; !h.ended && !t.Failed(); {
		h.ended = left <= 0
		d := min(left, span/4+time.Duration(rng.Int64N(int64(span*3/4)+1)))
		left -= d
		s.live(binary, dir, &h, d, rng.IntN(5) > 0)
	}
	report, err := inspect.VerifyDir(t.Context(), nil, dir, inspect.VerifyOptions{})
	if err != nil || !report.OK() || !report.Accounted {
		t.Errorf("verify: %+v, %v", report, err)
	}
	s.judge()
}

// live is one life of the server: it starts, must have what was promised before, takes the load for
// d, and is killed or stopped. At the end of the history it takes none and is stopped.
func (s *storm) live(binary, dir string, h *history, d time.Duration, kill bool) {
	t := s.t
	p := start(t, binary, dir, "--memory", fmt.Sprint(memory), "--max-inflight-bytes", "64MiB", "--snapshot-lease-ttl", "10s")
	defer func() { s.peak = max(s.peak, p.peak.Load()) }()
	conn, slow := dial(t, p.address), dial(t, p.address)
	defer func() { _, _ = conn.Close(), slow.Close() }() // the server is gone
	c, err := client.Dial(p.address)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }() // the server is gone
	s.mustCheck(c, h, p)
	if h.ended {
		if err := p.stop(); err != nil {
			t.Errorf("SIGTERM at the end: %v\n%s", err, p.log())
		}
		return
	}
	h.add(h.last + 1)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	r := &round{storm: s, number: h.last, server: p, kv: pb.NewKVServiceClient(conn), slow: pb.NewKVServiceClient(slow), client: c, ctx: ctx}
	began, wait := time.Now(), r.run()
	select {
	case <-time.After(d):
	case <-p.exited:
		t.Errorf("round %d: the server ended by itself: %v\n%s", h.last, p.err, p.log())
	}
	s.end(p, cancel, kill)
	mustEnd(t, wait, h.last)
	s.loaded += time.Since(began)
}

// end kills the server under load, or ends the load and stops the server with SIGTERM.
func (s *storm) end(p *process, endLoad func(), kill bool) {
	if kill {
		s.kills++
		_ = p.kill()
		endLoad()
		return
	}
	s.stops++
	p.planned.Store(true)
	endLoad()
	if err := p.stop(); err != nil {
		s.t.Errorf("SIGTERM: %v\n%s", err, p.log())
	}
}

// mustEnd waits for the load of a round: a client that is still waiting long after the server has
// gone is stuck.
func mustEnd(t *testing.T, wait func(), number int) {
	t.Helper()
	ended := make(chan struct{})
	go func() { wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(2 * patience):
		t.Fatalf("round %d: a client is stuck %v after the server has ended", number, 2*patience)
	}
}

// mustCheck reads back what the last round wrote, a sample of the rounds before and, at the end,
// everything; and it deletes old rounds.
func (s *storm) mustCheck(c *client.Client, h *history, p *process) {
	s.t.Helper()
	began := time.Now()
	if err := s.check(context.Background(), c, *h); err != nil {
		s.t.Fatalf("after round %d: %v\n%s", h.last, err, p.log())
	}
	s.checked += time.Since(began)
	s.t.Logf("round %d: checked in %v", h.last, time.Since(began).Round(time.Millisecond))
	if h.ended {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), checkMax)
	defer cancel()
	for _, round := range h.expire() {
		if err := s.deleteRound(ctx, c, round); err != nil {
			s.t.Fatalf("after round %d: %v", h.last, err)
		}
	}
}

// judge reports the results of the storm, and fails where a promise was broken or nothing was
// proved.
func (s *storm) judge() {
	t := s.t
	put, get := time.Duration(s.longest[0].Load()), time.Duration(s.longest[1].Load())
	t.Logf("acknowledged: %d healthy, %d expiring, %d canceled, %d batches, %d piped, %d transfers; given up %d, refused %v",
		s.healthy.count(), s.expiring.count(), s.canceled.count(), s.batches.count(), s.piped.count(), s.transfers.Load(), s.gaveUp.Load(), s.refused)
	t.Logf("%d limited scans, %d slow readers, %d bulk loads committed; longest healthy put %v, get %v; resident memory at most %d MiB",
		s.scans.Load(), s.slowReaders.Load(), s.loads.done, put, get, s.peak>>20)
	t.Logf("%d kills, %d orderly stops; %v of load, %v of checks", s.kills, s.stops, s.loaded.Round(time.Second), s.checked.Round(time.Second))
	if bound := boundOf(memory); s.peak > bound {
		t.Errorf("resident memory reached %d MiB, the bound is %d MiB", s.peak>>20, bound>>20)
	}
	if put > stallMax || get > stallMax {
		t.Errorf("a healthy request took longer than %v: put %v, get %v", stallMax, put, get)
	}
	if n := s.refused["a healthy get"]; n > 0 {
		t.Errorf("%d healthy gets were refused, although slow readers have a connection of their own", n)
	}
	if s.healthy.count() == 0 || s.gaveUp.Load() == 0 || s.slowReaders.Load() == 0 || s.transfers.Load() == 0 || s.scans.Load() == 0 {
		t.Error("a kind of load did nothing: the storm proves nothing")
	}
	if *duration >= time.Minute && (s.loads.done == 0 || s.kills == 0 || s.stops == 0) {
		t.Error("a long storm without a bulk load, a kill or an orderly stop proves little")
	}
}
