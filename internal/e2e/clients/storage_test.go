package clients

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

// records are lines for import, in random order.
func records(n int, seed uint64) string {
	var lines strings.Builder
	for _, i := range rand.New(rand.NewPCG(seed, seed)).Perm(n) {
		value := strings.Repeat("v", i%300)
		if i%100 == 0 {
			value = strings.Repeat("L", 2000+i%17*1500)
		}
		fmt.Fprintf(&lines, "{\"key\":\"user/%d/%06d\",\"value\":\"%d-%s\"}\n", i%5, i, i, value)
	}
	return lines.String()
}

// TestBulkImportSurvivesAKillAndVerifies loads, inspects the store with every tool, and kills the
// server.
func TestBulkImportSurvivesAKillAndVerifies(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	const n = 20_000
	if out, stderr, code := s.kvctl(records(n, 3), "import", "--bulk", "-"); code != 0 || !strings.Contains(out, `{"epoch":`) {
		t.Fatalf("exit %d: %s%s", code, out, stderr)
	}
	first, _, _ := s.kvctl("", "export")
	if strings.Count(first, "\n") != n {
		t.Fatalf("%d lines came out", strings.Count(first, "\n"))
	}
	for _, args := range []string{"verify", "checkpoint", "space", "space --by-prefix --depth 2", "put user/0/000000 again", "verify -o json"} {
		if out, stderr, code := s.kvctl("", strings.Fields(args)...); code != 0 {
			t.Fatalf("kvctl %s: exit %d: %s%s", args, code, out, stderr)
		}
	}
	var space struct {
		Prefixes []struct {
			Prefix string `json:"prefix"`
			Keys   int    `json:"keys"`
		} `json:"prefixes"`
	}
	out, _, _ := s.kvctl("", "space", "--by-prefix", "--depth", "2", "-o", "json")
	if err := json.Unmarshal([]byte(out), &space); err != nil || len(space.Prefixes) != 5 || space.Prefixes[0].Keys != n/5 {
		t.Errorf("space by prefix: %v\n%s", err, out)
	}
	if _, _, code := s.kvctl("", "verify", "--data-dir", s.data()); code == 0 {
		t.Error("the files of a running server were verified")
	}
	if _, stderr, code := s.kvctl("", "put", "user/0/000000", "0-"); code != 0 {
		t.Fatal(stderr)
	}
	want, _, _ := s.kvctl("", "export")
	s.signal(syscall.SIGKILL)
	if out, stderr, code := s.kvctl("", "verify", "--data-dir", s.data()); code != 0 {
		t.Errorf("after the kill: exit %d: %s%s", code, out, stderr)
	}
	s.start()
	if again, _, _ := s.kvctl("", "export"); again != want {
		t.Error("the store differs after the kill")
	}
}

func (s *server) data() string { return filepath.Join(s.dir, "data") }

// TestLostConnectionLeavesNothingOfABulkLoad also begins the next load.
func TestLostConnectionLeavesNothingOfABulkLoad(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c := s.dial(s.endpoint)
	lost := s.dial(s.endpoint)
	l, err := lost.BulkLoad(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for i := range 50_000 {
		if err := l.Put(fmt.Appendf(nil, "k%d", i), make([]byte, 1000)); err != nil {
			t.Fatal(err)
		}
	}
	busy, err := c.BulkLoad(t.Context())
	if err == nil {
		_, err = busy.Commit()
	}
	var refused *client.Error
	if !errors.As(err, &refused) || refused.Reason != kvpb.ErrorReason_ERROR_REASON_BULK_LOAD_BUSY || refused.RetryAfter == 0 {
		t.Fatalf("a second load: %v", err)
	}
	if err := lost.Close(); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		again, err := c.BulkLoad(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		_ = again.Put([]byte("only"), []byte("this"))
		if _, err = again.Commit(); err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("no load can begin: %v", err)
		}
	}
	if out, _, _ := s.kvctl("", "scan", "--keys-only", "-o", "raw"); out != "only\n" {
		t.Errorf("the store holds %.200q", out)
	}
	if left, _ := filepath.Glob(filepath.Join(s.data(), "*.tmp")); len(left) > 0 {
		t.Errorf("left over: %v", left)
	}
}

// TestDamagedPageIsDataLossForItsKeysAlone flips a byte in one leaf on disk.
func TestDamagedPageIsDataLossForItsKeysAlone(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	const n = 5000
	if _, stderr, code := s.kvctl(records(n, 5), "import", "--bulk", "-"); code != 0 {
		t.Fatal(stderr)
	}
	if code := s.signal(syscall.SIGTERM); code != 0 {
		t.Fatalf("exit %d", code)
	}
	flipLeaf(t, filepath.Join(s.data(), "data.ekv"), 4)
	s.start()
	c := s.dial(s.endpoint)
	lost, served := 0, 0
	for i := 0; i < n; i += 7 {
		key := fmt.Sprintf("user/%d/%06d", i%5, i)
		v, err := c.Get(context.Background(), []byte(key))
		var failed *client.Error
		switch {
		case err == nil && v.Found:
			served++
		case errors.As(err, &failed) && failed.Reason == kvpb.ErrorReason_ERROR_REASON_CORRUPTION:
			lost++
			if failed.Metadata["key_lower"] > key || failed.Metadata["key_upper"] != "" && failed.Metadata["key_upper"] <= key {
				t.Fatalf("%s: the range is %v", key, failed.Metadata)
			}
		default:
			t.Fatalf("%s: %v, found %v", key, err, v.Found)
		}
	}
	if lost == 0 || lost > served/10 {
		t.Errorf("%d keys lost, %d served", lost, served)
	}
	if _, stderr, code := s.kvctl("", "export"); code != 8 {
		t.Errorf("export: exit %d: %s", code, stderr)
	}
	if out, stderr, code := s.kvctl("", "verify", "-o", "jsonl"); code != 8 || !strings.Contains(out, `"key_lower":"user/`) {
		t.Errorf("verify: exit %d: %s%s", code, out, stderr)
	}
	s.signal(syscall.SIGTERM)
	rescued := filepath.Join(s.dir, "rescued.jsonl")
	out, stderr, code := s.kvctl("", "salvage", "--data-dir", s.data(), "--out", rescued, "-o", "jsonl")
	if code != 8 || !strings.Contains(out, `"lost_total":1,`) {
		t.Errorf("salvage: exit %d: %s%s", code, out, stderr)
	}
	lines, err := os.ReadFile(rescued)
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Count(string(lines), "\n"); got < n*9/10 || got == n {
		t.Errorf("%d of %d keys were salvaged", got, n)
	}
	if _, stderr, code := s.kvctl("", "repair-log", "--data-dir", s.data(), "--yes"); code != 0 {
		t.Errorf("repair-log of a sound log: exit %d: %s", code, stderr)
	}
}

// flipLeaf changes a byte in the middle of the nth leaf of a file in which every leaf is in use.
func flipLeaf(t *testing.T, name string, n int) {
	t.Helper()
	const pageSize, leaf = 8192, 1
	file, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	for at := 2 * pageSize; at < len(file); at += pageSize {
		if file[at+4] != leaf {
			continue
		}
		if n--; n == 0 {
			file[at+pageSize/2] ^= 1
			if err := os.WriteFile(name, file, 0o600); err != nil {
				t.Fatal(err)
			}
			return
		}
	}
	t.Fatal("not that many leaves")
}
