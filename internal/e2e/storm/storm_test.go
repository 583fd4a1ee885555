// Package storm runs every kind of load at once against the real server, hostile ones included, kills the server again and again, and
// holds it to its promises: nothing acknowledged is lost, nothing is half there, no healthy client waits for a stranger, memory stays in
// its bound, and SIGTERM ends the process.
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
	"github.com/epochkv/epochkv/internal/storage"
)

var (
	duration = flag.Duration("storm.duration", 4*time.Second, "how long the storm lasts, kills and checks not counted")
	longest  = flag.Duration("storm.round", 0, "the longest time between two kills; 0: a tenth of the duration, 40 s at most")
	seedFlag = flag.Uint64("storm.seed", 0, "replays a schedule, not the races; 0: from the clock")
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
	s := newStorm(t, seed)
	var kills, stops, peak int64
	left := *duration
	for number := 0; ; number++ {
		p := start(t, binary, dir, "--memory", fmt.Sprint(memory), "--max-inflight-bytes", "64MiB", "--scan-token-ttl", "10s")
		conn := dial(t, p.address)
		c, err := client.Dial(p.address)
		if err != nil {
			t.Fatal(err)
		}
		kv := pb.NewKVClient(conn)
		ended := left <= 0
		s.mustCheck(c, kv, number, ended, p)
		if !ended {
			d := min(left, span/4+time.Duration(rng.Int64N(int64(span*3/4)+1)))
			left -= d
			kill := rng.IntN(5) > 0
			ctx, cancel := context.WithCancel(context.Background())
			r := &round{storm: s, number: number, server: p, kv: kv, client: c, ctx: ctx}
			wait := r.run()
			select {
			case <-time.After(d):
			case <-p.exited:
				t.Errorf("round %d: the server ended by itself: %v\n%s", number, p.err, p.log())
				left = 0
			}
			if kill {
				kills++
				_ = p.kill()
				cancel()
			} else {
				stops++
				p.planned.Store(true)
				cancel()
				if err := p.stop(); err != nil {
					t.Errorf("round %d: SIGTERM: %v\n%s", number, err, p.log())
				}
			}
			mustEnd(t, wait, number)
		} else if err := p.stop(); err != nil {
			t.Errorf("SIGTERM at the end: %v\n%s", err, p.log())
		}
		_ = c.Close() // the server is gone
		_ = conn.Close()
		peak = max(peak, p.peak.Load())
		if ended || t.Failed() {
			break
		}
	}
	report, err := storage.VerifyDir(t.Context(), nil, dir, storage.VerifyOptions{})
	if err != nil || !report.OK() || !report.Accounted {
		t.Errorf("verify: %+v, %v", report, err)
	}
	s.judge(peak)
	t.Logf("%d kills, %d orderly stops", kills, stops)
}

// mustEnd waits for the load of a round: a client that is still waiting long after the server has gone is stuck.
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

// mustCheck reads back what the last round wrote and, at the end, everything; and it deletes what is old, so that the store does not
// only grow.
func (s *storm) mustCheck(c *client.Client, kv pb.KVClient, number int, all bool, p *process) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	rng := rand.New(rand.NewPCG(s.seed, uint64(number)))
	choose := func(w *write) bool { return all || w.round >= number-1 || rng.IntN(20) == 0 }
	if err := s.check(ctx, c, kv, choose); err != nil {
		s.t.Fatalf("after round %d: %v\n%s", number-1, err, p.log())
	}
	if old := number - 4; old >= 0 && !all {
		for _, j := range s.journals() {
			prefix := fmt.Appendf(nil, "%s/%06d/", j.name, old)
			if _, err := c.DeleteRange(ctx, client.Prefix(prefix), 0, client.Sync()); err != nil {
				s.t.Fatalf("round %d: delete what is old: %v", number, err)
			}
			j.forget(old)
		}
	}
}

// judge says what the storm showed, and fails where it broke a promise or proved nothing.
func (s *storm) judge(peak int64) {
	t := s.t
	put, get := time.Duration(s.longest[0].Load()), time.Duration(s.longest[1].Load())
	t.Logf("acknowledged: %d healthy, %d expiring, %d canceled, %d batches, %d piped, %d transfers; given up %d, refused %v",
		s.healthy.count(acknowledged), s.expiring.count(acknowledged), s.canceled.count(acknowledged), s.batches.count(acknowledged),
		s.piped.count(acknowledged), s.transfers.Load(), s.gaveUp.Load(), s.refused)
	t.Logf("%d limited scans, %d slow readers, %d bulk loads committed; longest healthy put %v, get %v; resident memory at most %d MiB",
		s.scans.Load(), s.slowReaders.Load(), len(s.loads), put, get, peak>>20)
	if bound := boundOf(memory); peak > bound {
		t.Errorf("resident memory reached %d MiB, the bound is %d MiB", peak>>20, bound>>20)
	}
	if put > stallMax || get > stallMax {
		t.Errorf("a healthy request took longer than %v: put %v, get %v", stallMax, put, get)
	}
	if s.healthy.count(acknowledged)+s.healthy.count(lost) == 0 || s.gaveUp.Load() == 0 || s.slowReaders.Load() == 0 || s.transfers.Load() == 0 ||
		s.scans.Load() == 0 {
		t.Error("a kind of load did nothing: the storm proves nothing")
	}
}
