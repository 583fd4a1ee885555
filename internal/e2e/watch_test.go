package e2e

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/epochkv/epochkv/client"
)

var watchDuration = flag.Duration("watch.duration", 2*time.Second, "how long TestWatchesKeepTheirPromises writes")

// watched is what one watcher has received, in order, with the parts of a commit put together.
type watched struct {
	name    string
	prefix  string
	options client.WatchOptions
	slow    time.Duration // after each update
	breaks  bool          // it begins a new watch with its token after every few updates
	log     []seenCommit
	promise client.Epoch // the newest progress: everything up to it has come
	problem string
}

type seenCommit struct {
	epoch  client.Epoch
	events []client.Event
	open   bool // the end has not come yet
}

// follow receives until the last key has come.
func (w *watched) follow(ctx context.Context, c *client.Client, last string) {
	rng := rand.New(rand.NewPCG(1, uint64(len(w.name))))
	for w.problem == "" {
		updates := 1 << 30
		if w.breaks {
			updates = 1 + rng.IntN(20)
		}
		for u, err := range c.Watch(ctx, []client.Range{client.Prefix([]byte(w.prefix))}, w.options) {
			if err != nil {
				w.problem = err.Error()
				return
			}
			if w.take(&u, last) || w.problem != "" {
				return
			}
			time.Sleep(w.slow)
			if len(u.Token) > 0 {
				w.options.Token = u.Token
			}
			if updates--; updates == 0 {
				break
			}
		}
	}
}

// take checks one update against those before it, and reports whether it was the last.
func (w *watched) take(u *client.Update, last string) (done bool) {
	for i := range u.Commits {
		c := &u.Commits[i]
		var now *seenCommit
		if n := len(w.log); n > 0 {
			now = &w.log[n-1]
		}
		switch {
		case now != nil && c.Epoch == now.epoch && now.open:
		case now != nil && now.open:
			w.problem = fmt.Sprintf("commit %d came before the end of %d", c.Epoch, now.epoch)
		case now != nil && c.Epoch <= now.epoch:
			w.problem = fmt.Sprintf("commit %d came after %d", c.Epoch, now.epoch)
		case c.Epoch <= w.promise:
			w.problem = fmt.Sprintf("commit %d came after progress at %d", c.Epoch, w.promise)
		default:
			w.log = append(w.log, seenCommit{epoch: c.Epoch})
			now = &w.log[len(w.log)-1]
		}
		now.events, now.open = append(now.events, c.Events...), !c.End
		done = done || len(c.Events) > 0 && string(c.Events[len(c.Events)-1].Key) == w.prefix+last
	}
	if n := len(w.log); len(u.Commits) == 0 {
		if w.promise = u.Epoch; n > 0 && u.Epoch < w.log[n-1].epoch {
			w.problem = fmt.Sprintf("progress at %d after commit %d", u.Epoch, w.log[n-1].epoch)
		}
	}
	return done
}

// check checks the whole of what was received: nothing is open, keys ascend, and previous values are those of the commits before.
func (w *watched) check(t *testing.T) (state map[string]string) {
	t.Helper()
	if w.problem != "" {
		t.Fatalf("%s: %s", w.name, w.problem)
	}
	state = map[string]string{}
	for i := range w.log {
		c := &w.log[i]
		if c.open {
			t.Errorf("%s: commit %d has no end", w.name, c.epoch)
		}
		if !slices.IsSortedFunc(c.events, func(a, b client.Event) int { return bytes.Compare(a.Key, b.Key) }) {
			t.Errorf("%s: the events of commit %d are not in the order of keys", w.name, c.epoch)
		}
		for _, e := range c.events {
			if before, ok := state[string(e.Key)]; w.options.Previous && !e.PreviousUnavailable && (ok != (e.Previous != nil) || before != string(e.Previous)) {
				t.Errorf("%s: commit %d: the value of %s before it is %q, %v; shown as %q", w.name, c.epoch, e.Key, before, ok, e.Previous)
			}
			if e.Kind == client.EventDelete {
				delete(state, string(e.Key))
			} else {
				state[string(e.Key)] = string(e.Value)
			}
		}
	}
	return state
}

// acknowledged is a write that was acknowledged, with what it did.
type acknowledged struct {
	epoch client.Epoch
	did   map[string]string // "" is a deletion
}

// writeHistory writes batches until ctx ends, and returns those that were acknowledged.
func writeHistory(ctx context.Context, c *client.Client, name string) (all []acknowledged) {
	rng := rand.New(rand.NewPCG(2, uint64(name[0])))
	for n := 0; ctx.Err() == nil; n++ {
		did := map[string]string{}
		b := new(client.Batch)
		for range 1 + rng.IntN(4) {
			key := fmt.Sprintf("%c/%02d", 'a'+rng.IntN(2), rng.IntN(40))
			if _, twice := did[key]; twice {
				continue
			}
			if did[key] = ""; rng.IntN(4) == 0 {
				b.Delete([]byte(key))
				continue
			}
			did[key] = fmt.Sprintf("%s%d%s", name, n, strings.Repeat(".", rng.IntN(200)))
			b.Put([]byte(key), []byte(did[key]))
		}
		if e, err := c.Write(context.WithoutCancel(ctx), b); err == nil {
			all = append(all, acknowledged{e, did})
		}
	}
	return all
}

// TestWatchesKeepTheirPromises over a history of concurrent writers, while the real server is killed, and stopped, and started
// again: ordered, unique, atomic, reliable, resumable, progress, previous values. For longer: -watch.duration=5m
func TestWatchesKeepTheirPromises(t *testing.T) {
	binary, dir := mustBuild(t), t.TempDir()
	args := []string{"--retention", "1m", "--memory", "64MiB", "--close-timeout", "5s"}
	p := mustRun(t, binary, dir, args...)
	args = append(args, "--listen", p.address)
	dial := func() *client.Client {
		c, err := client.Dial("passthrough:///"+p.address, client.WithRetry(client.Retry{Attempts: 100, Base: 5 * time.Millisecond, Max: 50 * time.Millisecond}))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	begin := client.Epoch(0)
	watchers := []*watched{
		{name: "all", options: client.WatchOptions{After: &begin, Previous: true}},
		{name: "slow", options: client.WatchOptions{After: &begin}, slow: 2 * time.Millisecond},
		{name: "breaks", options: client.WatchOptions{After: &begin}, breaks: true},
		{name: "one prefix", prefix: "a/", options: client.WatchOptions{After: &begin, Progress: 100 * time.Millisecond}},
	}
	ctx, cancel := context.WithTimeout(context.Background(), *watchDuration+time.Minute)
	defer cancel()
	var following, writing sync.WaitGroup
	for _, w := range watchers {
		c := dial()
		following.Go(func() { w.follow(ctx, c, "~last") })
	}
	writes, stop := context.WithTimeout(ctx, *watchDuration)
	defer stop()
	histories := make([][]acknowledged, 3)
	for i := range histories {
		c := dial()
		writing.Go(func() { histories[i] = writeHistory(writes, c, string(rune('x'+i))) })
	}
	for n := 0; writes.Err() == nil; n++ {
		select {
		case <-writes.Done():
		case <-time.After(min(*watchDuration/3, 2*time.Second)):
			if n%2 == 0 {
				p.kill(t)
			} else {
				_ = p.cmd.Process.Signal(syscall.SIGTERM)
				if err := <-p.exited; err != nil {
					t.Errorf("the server ended with %v after SIGTERM", err)
				}
			}
			p = mustRun(t, binary, dir, args...)
		}
	}
	writing.Wait()
	last := dial()
	for _, key := range []string{"a/~last", "~last"} {
		if _, err := last.Put(ctx, []byte(key), nil); err != nil {
			t.Fatal(err)
		}
	}
	following.Wait()
	checkWatches(t, watchers, slices.Concat(histories...))
	mustHoldWhatWasWatched(ctx, t, last, watchers[0].check(t))
	_ = p.cmd.Process.Signal(os.Interrupt)
	if err := <-p.exited; err != nil {
		t.Errorf("the server ended with %v", err)
	}
}

// checkWatches compares what was received with what was acknowledged, and with what other watchers received.
func checkWatches(t *testing.T, watchers []*watched, writes []acknowledged) {
	t.Helper()
	var first string
	for _, w := range watchers {
		w.check(t)
		byEpoch := map[client.Epoch]map[string]string{}
		var text strings.Builder
		for i := range w.log {
			did := map[string]string{}
			for _, e := range w.log[i].events {
				did[string(e.Key)] = string(e.Value)
			}
			byEpoch[w.log[i].epoch] = did
			fmt.Fprintln(&text, w.log[i].epoch, did)
		}
		for _, write := range writes {
			want := maps.Clone(write.did)
			maps.DeleteFunc(want, func(key, _ string) bool { return !strings.HasPrefix(key, w.prefix) })
			if got := byEpoch[write.epoch]; !maps.Equal(got, want) {
				t.Fatalf("%s: commit %d wrote %v, and came as %v", w.name, write.epoch, want, got)
			}
		}
		if w.prefix != "" {
			continue
		}
		if first == "" {
			first = text.String()
		}
		if text.String() != first {
			t.Errorf("%s received something else than %s", w.name, watchers[0].name)
		}
		t.Logf("%s: %d commits, %d writes acknowledged", w.name, len(w.log), len(writes))
	}
}

// mustHoldWhatWasWatched compares the state that events lead to with the store.
func mustHoldWhatWasWatched(ctx context.Context, t *testing.T, c *client.Client, want map[string]string) {
	t.Helper()
	got := map[string]string{}
	for e, err := range c.Scan(ctx, client.Range{}, client.ScanOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		got[string(e.Key)] = string(e.Value)
	}
	if !maps.Equal(got, want) {
		t.Errorf("the store has %d keys, and the events lead to %d", len(got), len(want))
	}
}
