package server

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// TestACommitWaitsForItsTurn: while large writes have no room and their slot is taken, a commit of more waits, and others are served. It commits once
// there is room. Its client's cancellation, an operator and a drain end the wait, and nothing is counted after it.
func TestACommitWaitsForItsTurn(t *testing.T) {
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		h := mustStart(t, with, func(c *config.Config) { c.Limits.InflightBytes = 64 * config.MiB })
		slot := &h.admission.words[shareLargeWrites].large
		claims := func() int {
			slot.mu.Lock()
			defer slot.mu.Unlock()
			return slot.claims.Len()
		}
		waiting := func(t *testing.T) (k *talk, id uint64, release func()) {
			t.Helper()
			k = h.talk(t)
			id = k.begin().Id
			for i := range 2 {
				k.must(txnPutRequest(fmt.Sprint("t", i), string(make([]byte, 1<<20))))
			}
			release = sync.OnceFunc(h.fillShare(shareLargeWrites, 0))
			t.Cleanup(release)
			if err := k.stream.Send(commitRequest); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the commit waits", func() bool { return claims() == 1 })
			return k, id, release
		}
		nothing := func(t *testing.T) {
			t.Helper()
			eventually(t, "nothing is counted any more", func() bool { return h.holdsNothing() && claims() == 0 })
		}
		wait := func(name string, test func(t *testing.T, k *talk, id uint64, release func())) {
			t.Run(name, func(t *testing.T) {
				k, id, release := waiting(t)
				test(t, k, id, release)
			})
		}
		wait("until there is room", func(t *testing.T, k *talk, _ uint64, release func()) {
			refused := h.admission.refused.Load()
			h.put(t, "k", "v")
			h.get(t, "k")
			other := h.talk(t)
			other.begin()
			other.must(txnPutRequest("o", "v"))
			if other.must(commitRequest).GetCommit().GetEpoch() == 0 {
				t.Error("a small transaction does not commit meanwhile")
			}
			release()
			if out, err := k.hear(); err != nil || out.GetCommit().GetEpoch() == 0 {
				t.Errorf("it did not commit: %v, %v", out, err)
			}
			if n := h.admission.refused.Load(); n != refused {
				t.Errorf("%d requests were refused", n-refused)
			}
			nothing(t)
		})
		wait("until its client cancels", func(t *testing.T, k *talk, _ uint64, release func()) {
			k.cancel()
			eventually(t, "it does not wait any more", func() bool { return claims() == 0 && h.Server.transactions.stats().Open == 0 })
			release()
			nothing(t)
		})
		wait("until an operator ends it", func(t *testing.T, k *talk, id uint64, release func()) {
			if _, err := h.admin.EndTransaction(testContext(t), &pb.EndTransactionRequest{Id: id}); err != nil {
				t.Error(err)
			}
			_, err := k.hear()
			failureOf(t, err).want(t, codes.Aborted, pb.ErrorReason_ERROR_REASON_TXN_ENDED)
			release()
			nothing(t)
		})
		wait("until the server drains", func(t *testing.T, k *talk, _ uint64, release func()) {
			stopped := make(chan error)
			go func() { stopped <- h.stop() }()
			_, err := k.hear()
			failureOf(t, err).want(t, codes.Unavailable, pb.ErrorReason_ERROR_REASON_SHUTTING_DOWN)
			k.must(rollbackRequest)
			release()
			if err := <-stopped; err != nil {
				t.Error(err)
			}
			nothing(t)
		})
	})
}

// waitingCommit is the stream of a transaction for awaitRoom, without a server that runs. The slot for large writes is taken by the connection itself.
func waitingCommit(ctx context.Context, most time.Duration) (c *transactionStream, conn *connection, slot *largeSlot) {
	s := &Server{clock: clock{started: time.Now()}}
	s.drain.init()
	s.admission.init(100, 1<<20)
	s.transactions.idle = most
	slot, conn = &s.admission.words[shareLargeWrites].large, new(connection)
	slot.take(conn, &conn.claims[shareLargeWrites], largeCommit)
	return &transactionStream{server: s, row: &openTxn{ctx: ctx}}, conn, slot
}

const largeCommit = 1 << 20

// TestTheWaitOfACommitIsBounded: by its deadline and the end of the transaction, with the reason; and by the time for which the transaction could wait
// for its next request.
func TestTheWaitOfACommitIsBounded(t *testing.T) {
	const most = 10 * time.Second
	for _, c := range []struct {
		name     string
		deadline time.Duration
		took     time.Duration
		with     error
	}{
		{"deadline", 3 * time.Second, 3 * time.Second, context.DeadlineExceeded},
		{"time of a request", time.Hour, most, errOverloaded},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), c.deadline)
				defer cancel()
				k, conn, slot := waitingCommit(ctx, most)
				start := time.Now()
				if err := k.awaitRoom(conn, 0, largeCommit); !errors.Is(err, c.with) {
					t.Errorf("got %v", err)
				}
				if took := time.Since(start); took != c.took || k.spent.queue != took {
					t.Errorf("it waited for %v, and notes %v", took, k.spent.queue)
				}
				if refused := k.server.admission.refused.Load(); refused != 1 || slot.claims.Len() > 0 {
					t.Errorf("%d refusals are counted, and %d claims left", refused, slot.claims.Len())
				}
			})
		})
	}
}

// TestCommitsTakeTurnsWithRequestsOfTheirConnection: large requests that follow each other on a connection at once let its commits that wait have every
// other turn; and among commits, one that ends its wait takes no claim from another.
func TestCommitsTakeTurnsWithRequestsOfTheirConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k, conn, slot := waitingCommit(t.Context(), time.Minute)
		a := &k.server.admission
		ended, end := context.WithCancel(t.Context())
		done := make(chan error, 2)
		for _, ctx := range []context.Context{t.Context(), ended} {
			commit := &transactionStream{server: k.server, row: &openTxn{ctx: ctx}}
			go func() { done <- commit.awaitRoom(conn, 0, largeCommit) }()
		}
		synctest.Wait()
		other := new(connection)
		if a.enter(other, shareLargeWrites, largeCommit) {
			t.Fatal("the slot has two requests")
		}
		end()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		slot.drop(conn)
		if a.enter(conn, shareLargeWrites, largeCommit) || a.enter(other, shareLargeWrites, largeCommit) {
			t.Fatal("one that asks later has the turn of a commit")
		}
		start := time.Now()
		if err := <-done; err != nil || time.Since(start) > commitAsks {
			t.Fatalf("the commit has its turn after %v: %v", time.Since(start), err)
		}
		a.leave(conn, shareLargeWrites, largeCommit)
		if !a.enter(other, shareLargeWrites, largeCommit) {
			t.Error("a commit has the turn of another connection")
		}
		a.leave(other, shareLargeWrites, largeCommit)
		if !a.enter(conn, shareLargeWrites, largeCommit) {
			t.Error("the commit leaves no turn to a request")
		}
	})
}
