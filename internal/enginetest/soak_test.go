package enginetest

import (
	"context"
	"encoding/binary"
	"flag"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

var (
	soakKeys   = flag.Int("soak.keys", 20_000, "keys that the soak test loads")
	soakMemory = flag.Int64("soak.memory", 32<<20, "memory budget of the soak test")
)

// residentBytes is the process's resident memory, from the kernel.
func residentBytes() int64 {
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	pages, _ := strconv.ParseInt(strings.Fields(string(text))[1], 10, 64)
	return pages * int64(os.Getpagesize())
}

// TestSoak loads random keys, overwrites some, reads all back, scans, and opens again. Large:
// go test ./internal/enginetest -run TestSoak -v -soak.keys 10000000 -soak.memory 268435456 -timeout 30m
func TestSoak(t *testing.T) {
	fs := vfs.NewOS()
	o := mvcc.Options{Storage: storage.Options{Dir: t.TempDir(), FS: fs, MemoryBytes: *soakMemory}}
	s := mustOpen(t, o)
	x := mustSession(t, s)
	key, value := make([]byte, 16), make([]byte, 100)
	var w mvcc.Write
	var worst time.Duration
	var peak int64
	start := time.Now()
	load := func(seed uint64, version byte, n int) {
		rng := rand.New(rand.NewPCG(seed, 1))
		for i := range n {
			binary.BigEndian.PutUint64(key, rng.Uint64())
			binary.BigEndian.PutUint64(key[8:], rng.Uint64())
			copy(value, key)
			value[16] = version
			w.Reset()
			w.Durability = mvcc.DurabilityAsync
			w.Set(key, value)
			begin := time.Now()
			if _, err := x.Commit(context.Background(), &w); err != nil {
				t.Fatal(err)
			}
			worst = max(worst, time.Since(begin))
			if i%100_000 == 0 {
				peak = max(peak, residentBytes())
			}
		}
	}
	load(1, 1, *soakKeys)
	load(1, 2, *soakKeys/4) // overwrites the first quarter
	st := s.Stats().Storage
	t.Logf("loaded in %v, worst put %v, peak %d MiB, stalls %d (%v), %+v", time.Since(start), worst, peak>>20, st.Backpressure.Stalls, st.Backpressure.StallTime, st.Tree)
	start = time.Now()
	rng := rand.New(rand.NewPCG(1, 1))
	var buf []byte
	for i := range *soakKeys {
		binary.BigEndian.PutUint64(key, rng.Uint64())
		binary.BigEndian.PutUint64(key[8:], rng.Uint64())
		v, err := x.Get(buf[:0], key, 0)
		if err != nil || !v.Found || string(v.Data[:16]) != string(key) || (v.Data[16] == 2) != (i < *soakKeys/4) {
			t.Fatalf("key %d: found %v, %v, %x", i, v.Found, err, v.Data)
		}
		buf = v.Data
		if i%100_000 == 0 {
			peak = max(peak, residentBytes())
		}
	}
	t.Logf("read in %v, peak %d MiB", time.Since(start), peak>>20)
	start = time.Now()
	if n := countPrefix(t, x, "", ""); n != *soakKeys {
		t.Fatalf("scan found %d of %d keys", n, *soakKeys)
	}
	t.Logf("scanned in %v", time.Since(start))
	x.Close()
	start = time.Now()
	mustClose(t, s)
	t.Logf("closed in %v", time.Since(start))
	runtime.GC()
	start = time.Now()
	s = mustOpen(t, o)
	t.Logf("opened in %v: %+v", time.Since(start), s.Recovery())
	if got := s.Stats().Storage.Tree.Entries; got != uint64(*soakKeys) {
		t.Fatalf("%d entries", got)
	}
}
