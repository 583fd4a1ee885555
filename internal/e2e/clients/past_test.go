package clients

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/epochkv/epochkv/client"
)

// past is every commit of a store with one writer, in order: the model of what a restore has to bring back.
type past struct {
	t   *testing.T
	rng *rand.Rand

	mu      sync.Mutex // guards commits, which a writer in the background extends
	commits []pastCommit
}

// pastCommit is a commit as its writer knows it.
type pastCommit struct {
	epoch  client.Epoch
	values map[string]string // "" is a deletion
}

func newPast(t *testing.T) *past {
	return &past{t: t, rng: rand.New(rand.NewPCG(uint64(len(t.Name())), 1))}
}

// commit writes once: mostly one value, or a deletion, or several of both at once.
func (p *past) commit(ctx context.Context, c *client.Client, valueBytes int) error {
	p.mu.Lock()
	number := len(p.commits)
	p.mu.Unlock()
	done := pastCommit{values: map[string]string{}}
	var batch client.Batch
	count := 1
	if p.rng.IntN(8) == 0 {
		count = 5
	}
	for len(done.values) < count {
		key := fmt.Sprintf("key/%03d", p.rng.IntN(400))
		if _, again := done.values[key]; again {
			continue
		}
		if p.rng.IntN(6) == 0 {
			done.values[key] = ""
			batch.Delete([]byte(key))
			continue
		}
		value := p.value(number, valueBytes)
		done.values[key] = value
		batch.Put([]byte(key), []byte(value))
	}
	var err error
	if done.epoch, err = c.Write(ctx, &batch, client.Sync()); err != nil {
		return err
	}
	p.add(done)
	return nil
}

// value cannot be compressed, and is one of a commit.
func (p *past) value(number, size int) string {
	value := fmt.Appendf(nil, "%d:", number)
	for len(value) < size {
		value = append(value, byte(p.rng.Uint32()))
	}
	return string(value)
}

func (p *past) add(done pastCommit) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.commits = append(p.commits, done)
}

// write makes a number of commits.
func (p *past) write(c *client.Client, count, valueBytes int) {
	p.t.Helper()
	for range count {
		if err := p.commit(p.t.Context(), c, valueBytes); err != nil {
			p.t.Fatal(err)
		}
	}
}

// fill writes large values under names of their own.
func (p *past) fill(c *client.Client, count, valueBytes int) {
	p.t.Helper()
	for i := range count {
		key, value := fmt.Sprintf("large/%03d", i), p.value(i, valueBytes)
		epoch, err := c.Put(p.t.Context(), []byte(key), []byte(value), client.Sync())
		if err != nil {
			p.t.Fatal(err)
		}
		p.add(pastCommit{epoch, map[string]string{key: value}})
	}
}

// writeUntil commits in the background, through ends of the server: a repeated request is executed once. The returned function
// stops the writer.
func (p *past) writeUntil(s *server) (stop func()) {
	c := s.dial(s.endpoint, client.WithTimeout(time.Minute), client.WithRetry(client.Retry{Attempts: 1 << 20, Base: 10 * time.Millisecond, Max: 200 * time.Millisecond}))
	ctx, cancel := context.WithCancel(p.t.Context())
	ended := make(chan error, 1)
	go func() {
		var err error
		for ctx.Err() == nil && err == nil {
			err = p.commit(p.t.Context(), c, 200)
		}
		ended <- err
	}()
	return func() {
		p.t.Helper()
		cancel()
		if err := <-ended; err != nil {
			p.t.Fatal(err)
		}
	}
}

// awaitCommits waits until so many commits more have been made.
func (p *past) awaitCommits(more int) {
	for want := p.count() + more; p.count() < want; time.Sleep(time.Millisecond) {
		if p.t.Context().Err() != nil || p.t.Failed() {
			return
		}
	}
}

func (p *past) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.commits)
}

// last is the epoch of the newest commit.
func (p *past) last() client.Epoch {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.commits[len(p.commits)-1].epoch
}

// at is the state after the last commit that is not later than an epoch.
func (p *past) at(e client.Epoch) map[string]string {
	p.mu.Lock()
	defer p.mu.Unlock()
	state := map[string]string{}
	for _, c := range p.commits {
		if c.epoch > e {
			break
		}
		for key, value := range c.values {
			if state[key] = value; value == "" {
				delete(state, key)
			}
		}
	}
	return state
}

// compare fails the test unless a store has every key of a past state, and no other.
func (p *past) compare(what string, c *client.Client, e client.Epoch) {
	p.t.Helper()
	want := p.at(e)
	count := len(want)
	for entry, err := range c.Scan(p.t.Context(), client.Range{}, client.ScanOptions{}) {
		if err != nil {
			p.t.Fatalf("%s: %v", what, err)
		}
		value, known := want[string(entry.Key)]
		if !known || value != string(entry.Value) {
			p.t.Errorf("%s: %s is %.20q with %d bytes, want %.20q with %d", what, entry.Key, entry.Value, len(entry.Value), value, len(value))
		}
		delete(want, string(entry.Key))
	}
	for key := range want {
		p.t.Errorf("%s: %s is missing", what, key)
	}
	p.t.Logf("%s: %d keys compared", what, count)
}

// wantRestored restores a state of a server's backups and archive, starts a server on it, and compares every key.
func (p *past) wantRestored(from *server, url string, e client.Epoch, target ...string) {
	p.t.Helper()
	s := &server{t: p.t, dir: p.t.TempDir(), endpoint: freeAddress(p.t), env: from.env}
	args := append([]string{"restore", "--from", url, "--data-dir", filepath.Join(s.dir, "data"), "-o", "json"}, target...)
	out, stderr, code := s.kvctl("", args...)
	var report struct {
		Epoch client.Epoch `json:"epoch"`
	}
	if err := json.Unmarshal([]byte(out), &report); code != 0 || err != nil || report.Epoch < e {
		p.t.Fatalf("kvctl %s: exit %d, %v\n%s%s", args, code, err, out, stderr)
	}
	s.run()
	p.compare(fmt.Sprint(target), s.dial(s.endpoint), e)
	s.signal(syscall.SIGKILL)
}
