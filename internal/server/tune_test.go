package server

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/auth/users"
	"github.com/epochkv/epochkv/internal/config"
)

// TestTheHeapMayGrowByOpenTransactions: the collector would otherwise run all the time beside a large one, and each get of others would take six times
// the processor time.
func TestTheHeapMayGrowByOpenTransactions(t *testing.T) {
	h, becomes := mustFollowHeap(t, func(c *config.Config) {
		c.Memory, c.Feed.Memory = 64*config.MiB, 8*config.MiB
		c.Limits.InflightBytes, c.Limits.TxnSize, c.Limits.ValueSize, c.Limits.BatchSize = 64*config.MiB, 64*config.MiB, 16*config.MiB, 64*config.MiB
	})
	becomes("what it is without them", 0)

	txn := h.talk(t)
	txn.begin()
	for _, key := range []string{"a", "b"} {
		txn.must(txnPutRequest(key, string(make([]byte, 15<<20))))
	}
	becomes("more by a transaction", 30<<20)
	txn.must(rollbackRequest)
	becomes("what it was", 0)

	mustWatch(t, h, &pb.CreateWatch{})
	becomes("more by watches", 8<<20+watchResponsesBytes)
}

// TestTheHeapMayGrowByLeases: with 100,000 of them each get would otherwise take ten times the processor time.
func TestTheHeapMayGrowByLeases(t *testing.T) {
	h, becomes := mustFollowHeap(t, func(c *config.Config) { c.Memory = 64 * config.MiB })
	const n = 20_000
	for range n {
		if _, _, err := h.leases.Grant(t.Context(), 0, time.Hour, ""); err != nil {
			t.Fatal(err)
		}
	}
	becomes("more by leases", n*config.LeaseBytes)
}

// TestTheHeapMayGrowByTheFileForTheArchive: it has the largest record until it is uploaded, however long that takes, and then nothing of it.
func TestTheHeapMayGrowByTheFileForTheArchive(t *testing.T) {
	const record = 12 << 20
	value := make([]byte, record)
	_, _ = rand.NewChaCha8([32]byte{}).Read(value) // it cannot be compressed
	for _, uploaded := range []bool{false, true} {
		t.Run(fmt.Sprint("uploaded ", uploaded), func(t *testing.T) {
			h := mustStart(t, func(c *config.Config) {
				c.Archive.URL, c.Archive.Interval, c.Archive.FileSize = t.TempDir(), time.Hour, config.GiB
				if uploaded {
					c.Archive.Interval, c.Archive.FileSize = 100*time.Millisecond, config.MiB
				}
			})
			before := h.heapLive()
			put, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte("a"), Value: value})
			if err != nil {
				t.Fatal(err)
			}
			if !uploaded {
				eventually(t, "the file counts", func() bool { return h.heapLive()-before >= record })
				if grown := h.heapLive() - before; grown > record+4<<20 {
					t.Errorf("%d bytes with a record of %d", grown, record)
				}
				return
			}
			awaitArchive(t, h, func(s *pb.ArchiveStatusResponse) bool { return s.GetArchivedEpoch() >= put.GetEpoch() })
			eventually(t, "the file that was uploaded takes no memory", func() bool { return h.heapLive()-before <= 2<<20 })
		})
	}
}

// TestTheHeapMayGrowByTheIndirectionTable: with some millions of large values the collector would otherwise run all the time.
func TestTheHeapMayGrowByTheIndirectionTable(t *testing.T) {
	h := mustStart(t)
	before := h.heapLive()
	const n = 5_000
	h.putLarge(t, n, int(h.config.PageSize)/2)
	if err := h.store.Checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
	if grown, least := h.heapLive()-before, int64(8*n); grown < least || grown > 2*least {
		t.Errorf("%d bytes with %d large values, want a little more than %d", grown, n, least)
	}
}

// TestTheHeapMayGrowByWatches: with 100,000 of them the collector would otherwise run all the time.
func TestTheHeapMayGrowByWatches(t *testing.T) {
	h := mustStart(t)
	w := mustWatch(t, h, &pb.CreateWatch{})
	w.recv()
	before := h.heapLive()
	const n = 100
	for i := range uint64(n) {
		w.send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: &pb.CreateWatch{WatchId: i + 10, Ranges: []*pb.KeyRange{{}}}}})
		w.of(i + 10)
	}
	if grown := h.heapLive() - before; grown != n*int64(config.WatchBytes) {
		t.Errorf("%d bytes with %d watches", grown, n)
	}
}

// TestTheHeapMayGrowByUsers: with 100,000 tokens each get would otherwise take ten times the processor time.
func TestTheHeapMayGrowByUsers(t *testing.T) {
	h, becomes := mustFollowHeap(t, func(c *config.Config) { c.Memory = 64 * config.MiB })
	var grants []auth.Grant
	for i := range 30 {
		key := bytes.Repeat([]byte{byte('A' + i)}, 1000)
		grants = append(grants, auth.Grant{Lower: key, Upper: append(key, 0), Read: true, Write: true, Lease: true})
	}
	for i := range 80 { // those with the same roles share their rights
		role := fmt.Sprint("wide", i)
		must(t, h.gate.users.CreateRole(t.Context(), &users.Role{Name: role, Grants: grants}))
		must(t, h.gate.users.CreateUser(t.Context(), users.User{Name: fmt.Sprint("user", i), Roles: []string{role}}, ""))
	}
	becomes("more by users", 80*3*30*2*1000)
}

// TestTheHeapMayGrowByPasswords: the collector would otherwise run all the time while clients log in.
func TestTheHeapMayGrowByPasswords(t *testing.T) {
	cheap := passwordCost
	passwordCost = users.HashCost{KiB: 16 << 10, Passes: 1, Threads: 1}
	t.Cleanup(func() { passwordCost = cheap }) // after the server has ended
	h, becomes := mustFollowHeap(t, func(c *config.Config) { c.Memory = 64 * config.MiB })
	ctx, stop := context.WithCancel(t.Context())
	var logins sync.WaitGroup
	logins.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			_, _, _ = h.gate.users.Login(ctx, fmt.Sprint("user", i), "some password", "", 0) // it does not exist
		}
	})
	becomes("more by passwords", int64(min(max(runtime.GOMAXPROCS(0)/2, 1), 2))*16<<20)
	stop()
	logins.Wait()
	becomes("less after the last password", 0)
}

// takenInTests is what the runtime takes in the tests of the limit: what the process of a test keeps says nothing of a server.
var takenInTests atomic.Int64

// mustFollowHeap starts a server, and returns what waits until the limit of the heap has so many bytes more than without anything.
func mustFollowHeap(t *testing.T, configure func(*config.Config)) (h *harness, becomes func(what string, live int64)) {
	t.Helper()
	t.Setenv("GOMEMLIMIT", "")
	limit := func() int64 { return debug.SetMemoryLimit(-1) }
	before := limit()
	said := heapTaken
	takenInTests.Store(0)
	heapTaken = takenInTests.Load
	t.Cleanup(func() { // after the server has ended
		debug.SetMemoryLimit(before)
		heapTaken = said
	})
	return mustStart(t, configure), func(what string, live int64) {
		t.Helper()
		eventually(t, what, func() bool { got := limit() - heapBytesMin; return got > live-heapLiveStep && got < live+heapLiveStep })
	}
}
