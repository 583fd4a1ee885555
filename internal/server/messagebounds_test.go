package server

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/auth/users"
	"github.com/epochkv/epochkv/internal/config"
)

// TestMessagesOfRequestsThatLastAreCounted: whatever is in them, as they wait for a lock or observe one. What there is no room for is refused, and all
// is given back in the end.
func TestMessagesOfRequestsThatLastAreCounted(t *testing.T) {
	const size, requests = 400 << 10, 60
	for name, last := range map[string]func(context.Context, *grpc.ClientConn, uint64) error{
		"waiters": func(ctx context.Context, conn *grpc.ClientConn, lease uint64) error {
			_, err := pb.NewLockServiceClient(conn).AcquireLock(ctx, withUnknownBytes(&pb.AcquireLockRequest{Name: []byte("l"), LeaseId: lease, Wait: durationpb.New(time.Hour)}, size))
			return err
		},
		"observers": func(ctx context.Context, conn *grpc.ClientConn, _ uint64) error {
			stream, err := pb.NewLockServiceClient(conn).ObserveLock(ctx, withUnknownBytes(&pb.ObserveLockRequest{Name: []byte("l")}, size))
			for err == nil {
				_, err = stream.Recv()
			}
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := mustStart(t, func(c *config.Config) { c.Limits.InflightBytes = 64 * config.MiB })
			locks, leases := pb.NewLockServiceClient(h.conn), pb.NewLeaseServiceClient(h.conn)
			var ids []uint64
			for range 2 {
				lease, err := leases.GrantLease(testContext(t), &pb.GrantLeaseRequest{Ttl: durationpb.New(time.Hour)})
				if err != nil {
					t.Fatal(err)
				}
				ids = append(ids, lease.Id)
			}
			if _, err := locks.AcquireLock(testContext(t), &pb.AcquireLockRequest{Name: []byte("l"), LeaseId: ids[0]}); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(testContext(t))
			defer cancel()
			conns := []*grpc.ClientConn{h.dial(t), h.dial(t), h.dial(t)}
			var refused, ended atomic.Int64
			var all sync.WaitGroup
			for i := range requests {
				all.Go(func() {
					defer ended.Add(1)
					if err := last(ctx, conns[i%len(conns)], ids[1]); status.Code(err) == codes.ResourceExhausted {
						refused.Add(1)
					}
				})
			}
			word := &h.admission.words[shareMessages]
			held := func() uint64 { return word.word.Load() & admissionBytes }
			eventually(t, "all wait or are refused", func() bool { return held()/size+uint64(refused.Load()) >= requests })
			if held() > word.limit.bytes || held() < word.limit.bytes/4 || refused.Load() != ended.Load() {
				t.Errorf("%d bytes of %d are counted, %d requests were refused and %d have ended", held(), word.limit.bytes, refused.Load(), ended.Load())
			}
			if answers := h.admission.words[shareAnswers].word.Load(); answers > 0 {
				t.Errorf("they take %d bytes of the share of answers, for as long as they like", answers&admissionBytes)
			}
			cancel()
			all.Wait()
			eventually(t, "all is given back", func() bool { return word.word.Load() == 0 })
		})
	}
}

// TestTokensOfWatchesThatWaitAreCounted: a watch that waits for its epoch, or for its turn, keeps the key at which its token goes on.
func TestTokensOfWatchesThatWaitAreCounted(t *testing.T) {
	const watches, size, ask = 1000, 200 << 10, 8
	h := mustStart(t, func(c *config.Config) { c.Feed.Watches = 2 * watches })
	h.feed.aheadTimeout = time.Hour
	all := []*pb.KeyRange{{}}
	ranges, err := toWatchRanges(all)
	if err != nil {
		t.Fatal(err)
	}
	token := feedToken{lineage: h.lineage(), filter: watchFilter(ranges, 0), snapshot: 1 << 40, last: make([]byte, size)}
	w := mustWatch(t, h)
	for id := range uint64(ask) {
		start := &pb.CreateWatch_ResumeToken{ResumeToken: token.encode()}
		w.send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: &pb.CreateWatch{WatchId: id, Ranges: all, Start: start}}})
	}
	for range ask - watches*1024/size + 1 {
		if f := failureOf(t, w.ended()); f.reason != pb.ErrorReason_ERROR_REASON_TOO_MANY_WATCHES.Reason() {
			t.Errorf("%+v", f)
		}
	}
	if used := h.feed.units.used.Load(); used > watches || used < watches/2 {
		t.Errorf("%d units of %d are used", used, watches)
	}
}

// TestErrorsAreShort, also if they quote what a client has sent: they wait for it uncounted, and many clients take 8 KiB of trailers.
func TestErrorsAreShort(t *testing.T) {
	long := strings.Repeat("ü", 300<<10)
	for _, err := range []error{
		&users.NotFoundError{Kind: "token", Name: long}, &users.ExistsError{Kind: "user", Name: long}, invalid("actions", "has "+long),
		&backupError{"the backup was not made", errors.New(long)},
	} {
		st := statusOf(err)
		if size := proto.Size(st.Proto()); size > 4<<10 || len(st.Details()) == 0 {
			t.Errorf("%T: %d bytes with %d details", err, size, len(st.Details()))
		}
	}
}
