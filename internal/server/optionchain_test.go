package server

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

var (
	optionChains = flag.Int("options.chains", 2, "chains of runs of TestOptionsChangeBetweenRuns")
	optionSeed   = flag.Uint64("options.seed", 0, "the seed of its first chain; 0 chooses one")
)

// optionValues are values of options that may differ from one run of a store to the next: the smallest, the largest that a test can afford,
// and others between.
var optionValues = []struct{ name, values string }{
	{"memory", "32MiB 64MiB 256MiB"},
	{"cache-size", "0 1MiB 16MiB"},
	{"memtable-size", "0 256KiB 4MiB"},
	{"segment-size", "0 64KiB 1MiB 8MiB"},
	{"disk-reserve", "0 1MiB 16MiB"},
	{"durability", "sync async"},
	{"transport", "direct grpc-go"},
	{"sync-interval", "1ms 50ms 1m"},
	{"retention", "0s 1ms 1s 8760h"},
	{"retention-size", "0 1 64KiB"},
	{"request-id-window", "1m 8760h"},
	{"request-id-size", "1MiB 1GiB"},
	{"checkpoint-interval", "1s 24h"},
	{"checkpoint-workers", "0 1 64"},
	{"gc-interval", "1ms 100ms 1m"},
	{"change-log-retention", "0s 1ms 8760h"},
	{"change-log-size", "1MiB 1GiB"},
	{"feed-memory", "1MiB 64MiB"},
	{"feed-sync-interval", "1ms 1m"},
	{"feed-catchup-readers", "1 64"},
	{"feed-catchup-bandwidth", "1MiB 1GiB"},
	{"max-value-size", "1 1KiB 64KiB"},
	{"max-batch-size", "64KiB 64MiB"},
	{"max-batch-ops", "1 100 200000"},
	{"max-inflight-requests", "1 16 16777216"},
	{"max-inflight-bytes", "0 64MiB 1024TiB 4611686018427387904"},
	{"max-connections", "1 64"},
	{"max-streams", "1 16777216"},
	{"max-transactions", "1 16777216"},
	{"max-leases", "1 16777216"},
	{"max-lock-waiters", "1 16777216"},
	{"max-watches", "1 100000"},
	{"max-watches-per-stream", "1 16777216"},
	{"max-watch-streams-per-client", "1 16777216"},
	{"snapshot-lease-ttl", "1s 24h"},
	{"snapshot-timeout", "0s 1m 8760h"},
	{"probe-interval", "0s 10ms 1h"},
	{"message-timeout", "30s 1h"},
	{"drain-timeout", "0s 10s"},
	{"slow-request-threshold", "0s 100us 1h"},
	{"slow-requests", "1 10000"},
	{"slow-requests-size", "4KiB 1GiB"},
	{"slow-request-key-bytes", "0 16"},
}

// chainCommit is a commit of which a chain knows.
type chainCommit struct {
	epoch client.Epoch
	sets  map[string]string // "" deletes
	id    client.RequestID
	sync  bool
}

// optionChain is a store through many runs.
type optionChain struct {
	*testing.T
	rng     *rand.Rand
	disk    *vfs.Mem
	commits []chainCommit
	token   []byte       // of a watch
	seen    client.Epoch // its epoch
	hold    client.Epoch // zero: none
	options string       // of this run
	checked struct{ states, held, repeated, delivered, gone int }
	client  *client.Client
}

// TestOptionsChangeBetweenRuns: whatever options a store is opened with, one run after the other, with a clean stop or a crash between, it has
// what was acknowledged, executes no request twice, keeps what a hold keeps, and a watch misses nothing or is told that it does.
func TestOptionsChangeBetweenRuns(t *testing.T) {
	testseed.SkipUnderRace(t)
	t.Parallel()
	seed := *optionSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	for range *optionChains {
		t.Logf("go test ./internal/server -run %s -options.chains 1 -options.seed %d", t.Name(), seed)
		c := &optionChain{T: t, rng: rand.New(rand.NewPCG(seed, 0)), disk: vfs.NewMem()} //nolint:gosec // to repeat it
		for range 8 {
			if c.run(); t.Failed() {
				return
			}
		}
		t.Logf("%+v", c.checked)
		seed++
	}
}

// configure is a configuration with random values of some options.
func (c *optionChain) configure() config.Config {
	next := testConfig()
	next.MemtableSize, next.SegmentSize, next.Memory, next.HTTP = 0, 0, 64*config.MiB, ""
	c.options = ""
	for _, i := range c.rng.Perm(len(optionValues))[:1+c.rng.IntN(len(optionValues))] {
		row := optionValues[i]
		values := strings.Fields(row.values)
		option := config.Option{Name: row.name, Value: values[c.rng.IntN(len(values))]}
		if changed, err := next.With(option); err == nil {
			next, c.options = changed, c.options+" --"+option.Name+"="+option.Value
		}
	}
	return next
}

// run opens the store, looks at what it has, changes it, and ends the server.
func (c *optionChain) run() {
	conf := c.configure()
	log := new(logBuffer)
	s, err := open(c.Context(), conf, slog.New(slog.NewTextHandler(log, nil)), c.disk)
	if err != nil {
		c.Fatalf("%s: %v", c.options, err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	c.client, err = client.Dial(s.Address(), client.WithTimeout(patience))
	if err != nil {
		c.Fatal(err)
	}
	c.look()
	c.follow()
	for range c.rng.IntN(60) {
		c.change(&conf)
	}
	if c.rng.IntN(3) == 0 {
		c.takeHold()
	}
	if c.rng.IntN(4) == 0 {
		if _, err := c.client.Checkpoint(c.Context()); err != nil {
			c.Errorf("%s: checkpoint: %v", c.options, err)
		}
	}
	crash := c.rng.IntN(2) == 0
	disk := c.disk
	if crash {
		disk = c.disk.Crash(c.rng.Uint64(), vfs.Survival(c.rng.IntN(3)))
	}
	_ = c.client.Close()
	stop()
	if err := <-ended; err != nil && !crash {
		c.Errorf("%s: the server ended with %v", c.options, err)
	}
	if c.Failed() {
		c.Logf("%s: the log: %s", c.options, log.String())
	}
	if !crash { // everything is durable
		for i := range c.commits {
			c.commits[i].sync = true
		}
	}
	c.disk = disk
}

// state is that after so many commits.
func (c *optionChain) state(commits int) map[string]string {
	state := map[string]string{}
	for _, commit := range c.commits[:commits] {
		for key, value := range commit.sets {
			if state[key] = value; value == "" {
				delete(state, key)
			}
		}
	}
	return state
}

func (c *optionChain) read(at client.Epoch) (map[string]string, error) {
	state := map[string]string{}
	for e, err := range c.client.Scan(c.Context(), client.Range{}, client.ScanOptions{At: at}) {
		if err != nil {
			return nil, err
		}
		state[string(e.Key)] = string(e.Value)
	}
	return state, nil
}

// look compares the store with what may have survived, and forgets what has not.
func (c *optionChain) look() {
	found, err := c.read(0)
	if err != nil {
		c.Fatalf("%s: %v", c.options, err)
	}
	for n := len(c.commits); n >= 0; n-- {
		if maps.Equal(found, c.state(n)) {
			c.commits = c.commits[:n]
			c.checked.states++
			for i := range c.commits {
				c.commits[i].sync = true // what a recovery has shown stays
			}
			c.lookBack()
			return
		}
		if n > 0 && c.commits[n-1].sync {
			break
		}
	}
	c.Fatalf("%s: the store has %d keys, which is no state of after the last durable commit; %d commits", c.options, len(found), len(c.commits))
}

// lookBack reads the state that is held, and repeats a request.
func (c *optionChain) lookBack() {
	if c.hold != 0 {
		c.checked.held++
		found, err := c.read(c.hold)
		n := 0
		for n < len(c.commits) && c.commits[n].epoch <= c.hold {
			n++
		}
		if err != nil || !maps.Equal(found, c.state(n)) {
			c.Errorf("%s: the state of the held epoch %d has %d keys instead of %d: %v", c.options, c.hold, len(found), len(c.state(n)), err)
		}
	}
	if len(c.commits) == 0 {
		return
	}
	commit := &c.commits[c.rng.IntN(len(c.commits))]
	epoch, err := c.write(commit)
	c.checked.repeated++
	switch e := (*client.Error)(nil); {
	case err == nil && epoch != commit.epoch:
		c.Errorf("%s: the request of epoch %d was executed again, as epoch %d", c.options, commit.epoch, epoch)
	case err != nil && (!errors.As(err, &e) || e.Reason != pb.ErrorReason_ERROR_REASON_REQUEST_ID_EXPIRED && !isLimit(e)):
		c.Errorf("%s: the request of epoch %d, repeated: %v", c.options, commit.epoch, err)
	}
}

// isLimit reports whether a request is beyond a limit of this run.
func isLimit(e *client.Error) bool {
	return e.Reason == pb.ErrorReason_ERROR_REASON_VALUE_TOO_LARGE || e.Reason == pb.ErrorReason_ERROR_REASON_BATCH_TOO_LARGE
}

func (c *optionChain) write(commit *chainCommit) (client.Epoch, error) {
	var b client.Batch
	for _, key := range slices.Sorted(maps.Keys(commit.sets)) {
		if value := commit.sets[key]; value == "" {
			b.Delete([]byte(key))
		} else {
			b.Put([]byte(key), []byte(value))
		}
	}
	durability := client.Async()
	if commit.sync {
		durability = client.Sync()
	}
	return c.client.Write(c.Context(), &b, client.As(commit.id), durability)
}

// change commits something, unless it is beyond a limit.
func (c *optionChain) change(conf *config.Config) {
	commit := chainCommit{sets: map[string]string{}, id: c.client.NewRequestID(), sync: c.rng.IntN(2) == 0}
	key := func() string { return fmt.Sprintf("key%03d", c.rng.IntN(200)) }
	value := commit.id.String() + strings.Repeat("v", []int{0, 100, 5000, 60_000}[c.rng.IntN(4)])
	commit.sets[key()] = value // the state after each commit is one that never was
	for range c.rng.IntN(5) {
		if k := key(); commit.sets[k] == "" {
			commit.sets[k] = []string{"", value[:min(len(value), 200)]}[c.rng.IntN(2)]
		}
	}
	epoch, err := c.write(&commit)
	fits := len(value) <= int(conf.Limits.ValueSize) && len(commit.sets) <= conf.Limits.BatchOps
	if e := (*client.Error)(nil); err != nil && !fits && errors.As(err, &e) && isLimit(e) {
		return
	}
	if err != nil {
		c.Fatalf("%s: a write of %d keys, and a value of %d bytes: %v", c.options, len(commit.sets), len(value), err)
	}
	commit.epoch = epoch
	if c.commits = append(c.commits, commit); commit.sync {
		for i := range c.commits {
			c.commits[i].sync = true
		}
	}
}

// takeHold holds the newest state, and everything from it on, through all later runs. A commit before it is then durable: so is the hold.
func (c *optionChain) takeHold() {
	h, err := c.client.TakeHold(c.Context(), "chain", client.Moment{}, 24*time.Hour)
	if err != nil {
		c.Errorf("%s: take a hold: %v", c.options, err)
		return
	}
	for i := range c.commits {
		c.commits[i].sync = true
	}
	if c.hold == 0 || c.rng.IntN(2) == 0 {
		c.hold = h.Epoch
	}
}

// follow goes on with the watch of the run before, and compares what it delivers with the commits.
func (c *optionChain) follow() {
	ctx, stop := context.WithTimeout(c.Context(), patience)
	defer stop()
	last := client.Epoch(0)
	var want []chainCommit
	for _, commit := range c.commits {
		last = max(last, commit.epoch)
		if commit.epoch > c.seen {
			want = append(want, commit)
		}
	}
	o := client.WatchOptions{Token: c.token, Progress: 100 * time.Millisecond}
	if c.token == nil {
		o.After = &last
		want = nil
	}
	for u, err := range c.client.Watch(ctx, []client.Range{{}}, o) {
		if e := (*client.Error)(nil); errors.As(err, &e) && (e.Reason == pb.ErrorReason_ERROR_REASON_HISTORY_GONE) {
			c.token = nil
			c.checked.gone++
			return
		}
		if err != nil {
			c.Errorf("%s: the watch after epoch %d: %v", c.options, c.seen, err)
			c.token = nil
			return
		}
		for _, commit := range u.Commits {
			if want = c.delivered(want, &commit); c.Failed() {
				return
			}
		}
		inside := len(u.Commits) > 0 && !u.Commits[len(u.Commits)-1].End
		if c.token = u.Token; u.Epoch >= last && !u.Partial && !inside {
			c.seen = u.Epoch
			break
		}
	}
	if len(want) > 0 {
		c.Errorf("%s: the watch is at epoch %d, and has not delivered epoch %d", c.options, c.seen, want[0].epoch)
	}
}

// delivered takes the events of a commit, or of a part of it, from those that must come.
func (c *optionChain) delivered(want []chainCommit, commit *client.Commit) []chainCommit {
	if len(want) == 0 || want[0].epoch != commit.Epoch {
		c.Errorf("%s: the watch after epoch %d delivers epoch %d, which is not the next one of %d", c.options, c.seen, commit.Epoch, len(want))
		return nil
	}
	c.checked.delivered++
	rest := maps.Clone(want[0].sets)
	for _, event := range commit.Events {
		value, known := rest[string(event.Key)]
		if !known || value != string(event.Value) || (event.Kind == client.EventDelete) != (value == "") {
			c.Errorf("%s: epoch %d: the watch delivers %v of %q", c.options, commit.Epoch, event.Kind, event.Key)
		}
		delete(rest, string(event.Key))
	}
	if !commit.End {
		return append([]chainCommit{{epoch: commit.Epoch, sets: rest}}, want[1:]...)
	}
	for key, value := range rest {
		if value != "" { // the deletion of a key that does not exist may be no event
			c.Errorf("%s: epoch %d: the watch leaves %q out", c.options, commit.Epoch, key)
		}
	}
	return want[1:]
}
