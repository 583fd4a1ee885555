package sim

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/epochkv/epochkv/client"
)

// server is the real kvserver in a process of its own.
type server struct {
	cmd      *exec.Cmd
	endpoint string
}

func mustStart(t *testing.T, binary, dir string) *server {
	t.Helper()
	s := &server{cmd: exec.Command(binary, "--data-dir", dir, "--listen", "127.0.0.1:0", "--http", "", "--log-format", "json",
		"--memory", "64MiB", "--memtable-size", "256KiB", "--segment-size", "64KiB")}
	stderr, err := s.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.kill)
	lines := bufio.NewScanner(stderr)
	for s.endpoint == "" && lines.Scan() {
		var line struct{ Msg, Listen string }
		if json.Unmarshal(lines.Bytes(), &line) == nil && line.Msg == "serving" {
			s.endpoint = line.Listen
		}
	}
	if s.endpoint == "" {
		t.Fatal("the server does not say where it serves")
	}
	go func() {
		for lines.Scan() { // so that it never waits for a reader
		}
	}()
	return s
}

// kill ends the process without notice. A second call does nothing.
func (s *server) kill() {
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait()
}

// wireSession is a Session over the network.
type wireSession struct {
	ctx    context.Context
	client *client.Client
	txn    *client.Txn
}

func (s *wireSession) Begin(level Level) (err error) {
	s.rollback()
	options := []client.TxnOption{client.CommitWith(client.Sync())}
	if level == Snapshot {
		options = append(options, client.SnapshotIsolation())
	}
	s.txn, err = s.client.Begin(s.ctx, options...)
	return err
}

func (s *wireSession) Get(key string) (string, error) {
	v, err := s.txn.Get([]byte(key))
	return string(v.Data), err
}

func (s *wireSession) Set(key, value string) error { return s.txn.Put([]byte(key), []byte(value)) }

func (s *wireSession) Append(key, suffix string) error {
	_, err := s.txn.Invoke(client.Append([]byte(key), []byte(suffix)))
	return err
}

func (s *wireSession) Scan(prefix string) (map[string]string, error) {
	all := map[string]string{}
	for e, err := range s.txn.Scan(client.Prefix([]byte(prefix)), client.ScanOptions{PageBytes: 64}) {
		if err != nil {
			return nil, err
		}
		all[string(e.Key)] = string(e.Value)
	}
	return all, nil
}

func (s *wireSession) Commit() error {
	_, err := s.txn.Commit()
	var e *client.Error
	switch {
	case errors.Is(err, client.ErrConflict):
		return fmt.Errorf("%w: %w", ErrConflict, err)
	case errors.As(err, &e) && e.OutcomeUnknown():
		return fmt.Errorf("%w: %w", ErrInDoubt, err)
	}
	return err
}

func (s *wireSession) rollback() {
	if s.txn != nil {
		s.txn.Rollback()
	}
}

func (s *wireSession) Close() {
	s.rollback()
	_ = s.client.Close() // its server may be gone
}

// Transactions over the wire against the real binary, which is killed during them again and again.
func TestHistoriesSurviveKillingTheServer(t *testing.T) {
	binary := filepath.Join(t.TempDir(), "kvserver")
	if out, err := exec.Command("go", "build", "-o", binary, "github.com/epochkv/epochkv/cmd/kvserver").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	for _, level := range []Level{Snapshot, Strict} {
		t.Run(fmt.Sprintf("level=%d", level), func(t *testing.T) {
			runs(t, func(t *testing.T, rng *rand.Rand) {
				w := &workload{level: level, clients: 8, keys: 6, opsMax: 4, rounds: 1 << 20, perKeys: 100}
				h, dir := NewHistory(), t.TempDir()
				const kills = 4
				for round := range kills + 1 {
					s := mustStart(t, binary, dir)
					open := func() (Session, error) {
						c, err := client.Dial(s.endpoint)
						return &wireSession{ctx: t.Context(), client: c}, err
					}
					if round == kills {
						w.readAll(t, h, open)
					} else {
						w.clientsAt(t, h, rng.Uint64(), open, func(context.Context) {
							time.Sleep(time.Duration(50+rng.IntN(250)) * time.Millisecond)
							s.kill()
						})
					}
					s.kill()
				}
				w.check(t, h)
			})
		})
	}
}
