package main

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/epochkv/epochkv/client"
)

var kills = flag.Int("kills", 12, "how often TestViewStaysInStepThroughKills kills one of the two processes")

// TestMain is also the consumer: the test starts its own binary with these variables, so that it can kill it.
func TestMain(m *testing.M) {
	if endpoint := os.Getenv("SQLITEVIEW_ENDPOINT"); endpoint != "" {
		if err := run(context.Background(), endpoint, []byte("view/"), os.Getenv("SQLITEVIEW_DB")); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// killable is a process that is started again after each kill.
type killable struct {
	t       *testing.T
	command func() *exec.Cmd
	running *exec.Cmd
}

func (k *killable) start() {
	k.running = k.command()
	k.running.Stderr = os.Stderr
	if err := k.running.Start(); err != nil {
		k.t.Fatal(err)
	}
}

func (k *killable) kill() {
	_ = k.running.Process.Kill()
	_ = k.running.Wait()
}

func freeAddress(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}

// write changes keys inside and outside of the prefix until it is told to stop: single keys, deletions, batches that make more
// than one response, and a few bulk loads.
func write(ctx context.Context, c *client.Client, stop <-chan struct{}) error {
	rng := rand.New(rand.NewPCG(1, 2))
	key := func() []byte {
		return fmt.Appendf(nil, "%s/%03d", []string{"other", "view", "view"}[rng.IntN(3)], rng.IntN(300))
	}
	for i := 0; ; i++ {
		select {
		case <-stop:
			return nil
		default:
		}
		var err error
		switch what := rng.IntN(100); {
		case what < 60:
			_, err = c.Put(ctx, key(), fmt.Append(nil, i))
		case what < 90:
			_, err = c.Delete(ctx, key())
		case what < 98:
			b := new(client.Batch)
			for k := range 300 {
				b.Put(fmt.Appendf(nil, "view/%03d", k), bytes.Repeat(fmt.Append(nil, i, " "), 300))
			}
			_, err = c.Write(ctx, b)
		default:
			err = load(ctx, c, i)
			if e, ok := errors.AsType[*client.Error](err); ok && (e.Retryable() || e.OutcomeUnknown()) {
				err = nil // the server was killed meanwhile
			}
		}
		if err != nil {
			return err
		}
	}
}

func load(ctx context.Context, c *client.Client, i int) error {
	l, err := c.BulkLoad(ctx)
	if err != nil {
		return err
	}
	defer l.Close()
	for k := 100; k < 200; k++ {
		if err := l.Put(fmt.Appendf(nil, "view/%03d", k), fmt.Append(nil, "loaded ", i)); err != nil {
			return err
		}
	}
	_, err = l.Commit()
	return err
}

// state is what a reader of the database sees.
type state struct {
	epoch    client.Epoch
	complete bool
	rows     map[string]string
}

func readView(ctx context.Context, file string) (s state, err error) {
	db, err := sql.Open("sqlite", "file:"+file+"?mode=ro&_pragma=busy_timeout(10000)")
	if err != nil {
		return s, err
	}
	defer func() { _ = db.Close() }()
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return s, err
	}
	defer func() { _ = tx.Rollback() }()
	if err := tx.QueryRowContext(ctx, "select epoch, complete from position").Scan(&s.epoch, &s.complete); err != nil {
		return s, err
	}
	rows, err := tx.QueryContext(ctx, "select key, value from entries")
	if err != nil {
		return s, err
	}
	defer func() { _ = rows.Close() }()
	s.rows = map[string]string{}
	for rows.Next() {
		var key, value []byte
		if err := rows.Scan(&key, &value); err != nil {
			return s, err
		}
		s.rows[string(key)] = string(value)
	}
	return s, rows.Err()
}

// mustEqualServer compares the view with what the server had at the view's epoch.
func mustEqualServer(ctx context.Context, t *testing.T, c *client.Client, s state) {
	t.Helper()
	count := 0
	for e, err := range c.Scan(ctx, client.Prefix([]byte("view/")), client.ScanOptions{At: s.epoch}) {
		if err != nil {
			t.Fatal(err)
		}
		count++
		if value, ok := s.rows[string(e.Key)]; !ok || value != string(e.Value) {
			t.Fatalf("epoch %d, key %s: the view has %.40q (%v), the server %.40q of epoch %d", s.epoch, e.Key, value, ok, e.Value, e.Epoch)
		}
	}
	if count != len(s.rows) {
		t.Fatalf("epoch %d: the view has %d rows, the server %d keys", s.epoch, len(s.rows), count)
	}
}

// TestViewStaysInStepThroughKills kills the server and the consumer while keys change. After each kill the rows are exactly
// what the server had at the epoch of the view, and at the end the view has come to the last write.
func TestViewStaysInStepThroughKills(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	dir := t.TempDir()
	binary, address, file := filepath.Join(dir, "kvserver"), freeAddress(t), filepath.Join(dir, "view.sqlite")
	build := exec.CommandContext(ctx, "go", "build", "-o", binary, "./cmd/kvserver")
	build.Dir = filepath.Join("..", "..")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	server := &killable{t: t, command: func() *exec.Cmd {
		return exec.Command(binary, "--data-dir", filepath.Join(dir, "data"), "--listen", address, "--http", "", "--memory", "256MiB", "--retention", "10m", "--log-level", "error")
	}}
	consumer := &killable{t: t, command: func() *exec.Cmd {
		self := exec.Command(os.Args[0])
		self.Env = append(os.Environ(), "SQLITEVIEW_ENDPOINT="+address, "SQLITEVIEW_DB="+file)
		return self
	}}
	server.start()
	consumer.start()
	defer server.kill()
	defer consumer.kill()
	// A server that was killed may take long to start on a busy machine: the deadline of the test bounds that.
	c, err := client.Dial(address, client.WithRetry(client.Retry{Attempts: 1000, Base: 100 * time.Millisecond, Max: time.Second}))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()

	stop, written := make(chan struct{}), make(chan error, 1)
	stopOnce := sync.OnceFunc(func() { close(stop) })
	defer stopOnce()
	go func() { written <- write(ctx, c, stop) }()
	compared := 0
	for i := range *kills {
		time.Sleep(time.Duration(100+rand.IntN(500)) * time.Millisecond)
		if i%2 == 0 {
			consumer.kill()
			if s, err := readView(ctx, file); err == nil && s.complete {
				mustEqualServer(ctx, t, c, s)
				compared++
			}
			consumer.start()
		} else {
			server.kill()
			server.start()
		}
	}
	stopOnce()
	if err := <-written; err != nil {
		t.Fatal(err)
	}
	last, err := c.Put(ctx, []byte("view/last"), nil)
	if err != nil {
		t.Fatal(err)
	}
	var s state
	for s.epoch < last || !s.complete {
		time.Sleep(50 * time.Millisecond)
		if s, err = readView(ctx, file); err != nil {
			t.Fatal(err)
		}
	}
	mustEqualServer(ctx, t, c, s)
	t.Logf("epoch %d, %d rows, compared %d times", s.epoch, len(s.rows), compared+1)
}
