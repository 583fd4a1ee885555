package main

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
)

// etcdSnapshot unpacks a snapshot that etcd 3.7.3 wrote, after puts, overwritten values, deletions, a lease, a transaction of three operations
// and a compaction, and returns its name with the keys and values that etcd listed after it, and their leases.
func etcdSnapshot(t *testing.T) (name string, content []byte, want map[string]record) {
	t.Helper()
	packed, err := os.Open("testdata/migrate/etcd-3.7.snapshot.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = packed.Close() }()
	unpacked, err := gzip.NewReader(packed)
	if err != nil {
		t.Fatal(err)
	}
	if content, err = io.ReadAll(unpacked); err != nil {
		t.Fatal(err)
	}
	name = filepath.Join(t.TempDir(), "etcd.db")
	if err := os.WriteFile(name, content, 0o600); err != nil {
		t.Fatal(err)
	}
	list, err := os.ReadFile("testdata/migrate/etcd-3.7.keys")
	if err != nil {
		t.Fatal(err)
	}
	want = map[string]record{}
	for lines := bufio.NewScanner(bytes.NewReader(list)); lines.Scan(); {
		var key, value string
		var lease uint64
		if _, err := fmt.Sscanf(lines.Text(), "%q %q %x", &key, &value, &lease); err != nil {
			t.Fatal(err)
		}
		want[key] = record{value: []byte(value), lease: lease}
	}
	return name, content, want
}

func TestEtcdSnapshotHasTheKeysThatEtcdListed(t *testing.T) {
	name, _, want := etcdSnapshot(t)
	source, err := openEtcdSnapshot(name, func(int) {})
	if err != nil {
		t.Fatal(err)
	}
	defer source.close()
	leased := 0
	for {
		r, _, err := source.next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		w, ok := want[string(r.key)]
		if !ok || !bytes.Equal(r.value, w.value) || r.lease != w.lease {
			t.Errorf("%q = %q of lease %x, want %q of lease %x, listed %v", r.key, r.value, r.lease, w.value, w.lease, ok)
		}
		if r.lease != 0 {
			leased++
		}
		delete(want, string(r.key))
	}
	if len(want) > 0 || leased != 1 {
		t.Errorf("%d keys are missing: %v; %d keys with a lease, want 1", len(want), want, leased)
	}
}

func TestDamagedSnapshotsOfEtcdImportNothing(t *testing.T) {
	name, content, _ := etcdSnapshot(t)
	for _, c := range []struct {
		what   string
		change func([]byte) []byte
		says   string
	}{
		{"a byte differs", func(b []byte) []byte { b[len(b)/2] ^= 1; return b }, "differs from the checksum"},
		{"the checksum differs", func(b []byte) []byte { b[len(b)-1] ^= 1; return b }, "differs from the checksum"},
		{"the checksum is missing", func(b []byte) []byte { return b[:len(b)-32] }, "etcdctl snapshot save"},
		{"the end is missing", func(b []byte) []byte { return b[:len(b)-512] }, "differs from the checksum"},
		{"it is empty", func([]byte) []byte { return nil }, "etcdctl snapshot save"},
	} {
		if err := os.WriteFile(name, c.change(bytes.Clone(content)), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := openEtcdSnapshot(name, func(int) {}); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want an error with %q", c.what, err, c.says)
		}
	}
}

func redisWith(t *testing.T, fill func(*miniredis.Miniredis)) (address string) {
	t.Helper()
	server := miniredis.RunT(t)
	server.RequireAuth("secret-word")
	fill(server)
	return "redis://:secret-word@" + server.Addr() + "/0"
}

func readAll(t *testing.T, source recordSource) (records map[string]record, err error) {
	t.Helper()
	records = map[string]record{}
	for {
		r, _, err := source.next()
		if err == io.EOF {
			return records, nil
		}
		if err != nil {
			return records, err
		}
		records[string(r.key)] = r
	}
}

func TestRedisIsReadWithDeadlinesAndLargeValues(t *testing.T) {
	const many = 3 * redisScanCount
	large := strings.Repeat("x", redisReadBytes+1)
	address := redisWith(t, func(m *miniredis.Miniredis) {
		for i := range many {
			_ = m.Set(fmt.Sprintf("key/%d", i), fmt.Sprintf("value %d", i))
		}
		_ = m.Set("large", large)
		_ = m.Set("\xff\x00", "\x00\xfe")
		_ = m.Set("expiring", "soon")
		m.SetTTL("expiring", time.Hour)
		_ = m.DB(1).Set("elsewhere", "1")
	})
	before := time.Now()
	source, called, err := openRedis(t.Context(), address, false, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	defer source.close()
	if strings.Contains(called, "secret-word") {
		t.Errorf("the password is in the name for messages: %s", called)
	}
	got, err := readAll(t, source)
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != many+3 || string(got["large"].value) != large || string(got["\xff\x00"].value) != "\x00\xfe" || string(got["key/17"].value) != "value 17" {
		t.Errorf("%d keys, want %d with their values", len(got), many+3)
	}
	deadline := time.UnixMilli(int64(got["expiring"].expiresAt))
	if earliest := before.Add(time.Hour - time.Second); deadline.Before(earliest) || deadline.After(time.Now().Add(time.Hour)) {
		t.Errorf("the deadline is %v, want about an hour after %v", deadline, before)
	}
	if got["key/17"].expiresAt != 0 {
		t.Error("a key without a deadline has one")
	}
}

func TestKeysOfRedisThatAreNoStringsAreNeverLeftOutInSilence(t *testing.T) {
	address := redisWith(t, func(m *miniredis.Miniredis) {
		_ = m.Set("text", "1")
		m.HSet("people", "ann", "1")
		_, _ = m.SetAdd("colours", "red")
	})
	source, _, err := openRedis(t.Context(), address, false, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := readAll(t, source); err == nil || !strings.Contains(err.Error(), "--skip-unsupported") {
		t.Errorf("a hash: %v", err)
	}
	source.close()

	var report bytes.Buffer
	source, _, err = openRedis(t.Context(), address, true, &report)
	if err != nil {
		t.Fatal(err)
	}
	got, err := readAll(t, source)
	source.close()
	if want := "1 keys of type hash were left out\n1 keys of type set were left out\n"; err != nil || len(got) != 1 || report.String() != want {
		t.Errorf("%v, %v, report %q, want %q", got, err, report.String(), want)
	}
}
