package server

import (
	"bytes"
	"context"
	"net"
	"runtime"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/lease"
)

// unreadLists are requests that are not admitted, with answers of more than 100 KiB.
var unreadLists = map[string]struct {
	method  string
	request any
}{
	"lists":       {pb.LeaseService_ListLeases_FullMethodName, new(pb.ListLeasesRequest)},
	"keep-alives": {pb.LeaseService_KeepAlive_FullMethodName, &pb.KeepAliveRequest{Ids: longIDs(leaseListMax)}},
}

func longIDs(n int) (ids []uint64) {
	for i := range n {
		ids = append(ids, 1<<62+uint64(i))
	}
	return ids
}

// mustStartLists is a server with room for about 12 of these answers.
func mustStartLists(t *testing.T, timeout time.Duration) *harness {
	t.Helper()
	h := mustStart(t, func(c *config.Config) {
		c.MessageTimeout, c.Limits.InflightBytes = timeout, 8*config.MiB
		c.Limits.BatchSize, c.Limits.ValueSize = 1*config.MiB, 1*config.MiB
	})
	for id := range lease.ID(2500) {
		if _, _, err := h.leases.Grant(testContext(t), id+1, time.Hour, "an owner with a long name"); err != nil {
			t.Fatal(err)
		}
	}
	return h
}

// leaveUnread sends a request many times, and reads no answer.
func leaveUnread(ctx context.Context, t *testing.T, conn *grpc.ClientConn, method string, request any) {
	t.Helper()
	for range 40 {
		stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method)
		if err == nil {
			err = stream.SendMsg(request)
		}
		if err == nil {
			err = stream.CloseSend()
		}
		if err != nil {
			return // the connection has ended already, on a busy machine
		}
	}
}

// TestUnreadListsStayInTheShareOfAnswers, and answers to keep-alives: beyond the share they are refused, while requests of others and
// those of operators are served.
func TestUnreadListsStayInTheShareOfAnswers(t *testing.T) {
	for name, c := range unreadLists {
		t.Run(name, func(t *testing.T) {
			h := mustStartLists(t, time.Minute)
			share := int64(h.admission.words[shareAnswers].limit.bytes)
			ctx, cancel := context.WithCancel(testContext(t))
			defer cancel()
			leaveUnread(ctx, t, h.dialDeaf(t), c.method, c.request)
			eventually(t, "some are refused", func() bool { return h.admission.refused.Load() > 0 })
			if _, _, answers := h.admission.inflight(); answers < share/4 || answers > share {
				t.Errorf("%d bytes of answers are counted, of a share of %d", answers, share)
			}
			if _, err := h.admin.Status(ctx, new(pb.StatusRequest)); err != nil {
				t.Error(err)
			}
			if _, err := pb.NewLeaseServiceClient(h.conn).ListLeases(ctx, &pb.ListLeasesRequest{Limit: 100}); err != nil {
				t.Error(err)
			}
			cancel()
			eventually(t, "the room is given back", func() bool { _, _, answers := h.admission.inflight(); return answers == 0 })
		})
	}
}

// TestUnreadListsAreGivenUp after --message-timeout, and answers to keep-alives: their streams or their connection end.
func TestUnreadListsAreGivenUp(t *testing.T) {
	for name, c := range unreadLists {
		t.Run(name, func(t *testing.T) {
			h := mustStartLists(t, unreadTimeout)
			eventually(t, "some are refused", func() bool {
				leaveUnread(testContext(t), t, h.dialDeaf(t), c.method, c.request) // on a busy machine its connection may end before
				return h.admission.refused.Load() > 0
			})
			eventually(t, "the room is given back", func() bool { _, _, answers := h.admission.inflight(); return answers == 0 })
		})
	}
}

// TestAnswersOfEveryMethodAreCounted, whether an encoder was generated for their message or not.
func TestAnswersOfEveryMethodAreCounted(t *testing.T) {
	h := mustStart(t)
	conn := h.connections.admit(&net.TCPAddr{})
	defer h.connections.release(conn)
	ctx := peer.NewContext(t.Context(), &peer.Peer{Addr: &net.TCPAddr{}, AuthInfo: conn})
	for name, row := range rpcRows {
		_, answer, err := messagesOf(strings.TrimPrefix(name, "/"))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		padded(answer, countedBytesMin)
		out, err := h.countAnswer(ctx, row, answer, nil)
		if _, _, counted := h.admission.inflight(); err != nil || counted != int64(proto.Size(answer)) {
			t.Errorf("%s: %d bytes are counted for an answer of %d: %v", name, counted, proto.Size(answer), err)
		}
		buffers, err := h.codec().Marshal(out)
		if err != nil || !bytes.Equal(buffers.Materialize(), mustMarshal(t, answer)) {
			t.Errorf("%s: the answer is not encoded as it is: %v", name, err)
		}
		buffers.Free()
		if _, _, counted := h.admission.inflight(); counted != 0 {
			t.Fatalf("%s: %d bytes are counted when the answer was sent", name, counted)
		}
	}
}

// TestAnAnswerIsCountedOnce: that of an admitted request is not counted again where those of others are.
func TestAnAnswerIsCountedOnce(t *testing.T) {
	const size = 200 << 10
	for _, transport := range bothTransports {
		h := mustStart(t, onTransport(transport))
		h.putLarge(t, 1, size)
		ask(testContext(t), t, h.dialDeaf(t), "BatchGet", &pb.BatchGetRequest{Keys: [][]byte{getLarge.Key}})
		counted := int64(0)
		eventually(t, "the answer waits", func() bool { _, _, counted = h.admission.inflight(); return counted > 0 })
		for range 20 { // it may be counted again later
			if counted > size+4<<10 {
				t.Fatalf("%s: %d bytes are counted for an answer of %d", transport, counted, size)
			}
			time.Sleep(time.Millisecond)
			_, _, counted = h.admission.inflight()
		}
	}
}

// TestListsTakeTurns: while all turns are taken, another list of that kind waits, until its deadline or for a turn, and nothing else does.
func TestListsTakeTurns(t *testing.T) {
	h := mustStart(t)
	turns := h.lists.turns[listMemory]
	for range cap(turns) {
		turns <- struct{}{}
	}
	locks := pb.NewLockServiceClient(h.conn)
	late, cancel := context.WithTimeout(testContext(t), 50*time.Millisecond)
	defer cancel()
	if _, err := h.admin.ListTransactions(late, new(pb.ListTransactionsRequest)); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("without a turn: %v", err)
	}
	if _, err := locks.ListLocks(testContext(t), new(pb.ListLocksRequest)); err != nil {
		t.Error(err)
	}
	if _, err := h.admin.Status(testContext(t), new(pb.StatusRequest)); err != nil {
		t.Error(err)
	}
	answered := make(chan error, 1)
	go func() {
		_, err := h.admin.ListSnapshots(testContext(t), new(pb.ListSnapshotsRequest))
		answered <- err
	}()
	<-turns
	if err := <-answered; err != nil {
		t.Errorf("with a turn: %v", err)
	}
	eventually(t, "the turn is given back", func() bool { return len(turns) == cap(turns)-1 })
	mustFail, cancel := context.WithCancel(testContext(t))
	cancel()
	_, _ = h.admin.ListHolds(mustFail, new(pb.ListHoldsRequest))
	eventually(t, "no turn is lost", func() bool { return len(turns) == cap(turns)-1 })
}

// TestListsOfUsersLeaveProcessorsToOthers: any user may ask for its tokens, of which it may have a thousand, and each list takes milliseconds. What
// waits for its turn waits for no other list.
func TestListsOfUsersLeaveProcessorsToOthers(t *testing.T) {
	h := mustStart(t)
	turns := h.lists.turns[listUsers]
	if most := max(runtime.GOMAXPROCS(0)/2, 1); cap(turns) != most {
		t.Errorf("%d lists are made at once, want %d", cap(turns), most)
	}
	for range cap(turns) {
		turns <- struct{}{}
	}
	users := pb.NewAuthServiceClient(h.conn)
	for method, list := range map[string]func(context.Context) error{
		"users": func(ctx context.Context) error { _, err := users.ListUsers(ctx, new(pb.ListUsersRequest)); return err },
		"roles": func(ctx context.Context) error { _, err := users.ListRoles(ctx, new(pb.ListRolesRequest)); return err },
		"tokens": func(ctx context.Context) error {
			_, err := users.ListTokens(ctx, new(pb.ListTokensRequest))
			return err
		},
	} {
		late, cancel := context.WithTimeout(testContext(t), 50*time.Millisecond)
		if err := list(late); status.Code(err) != codes.DeadlineExceeded {
			t.Errorf("%s without a turn: %v", method, err)
		}
		cancel()
	}
	if _, err := pb.NewLockServiceClient(h.conn).ListLocks(testContext(t), new(pb.ListLocksRequest)); err != nil {
		t.Error(err)
	}
}

// TestListsOfLeasesAndLocksLeaveProcessorsToOthers: there may be very many of both, and each list takes milliseconds. What waits for its turn waits
// for no other list.
func TestListsOfLeasesAndLocksLeaveProcessorsToOthers(t *testing.T) {
	h := mustStart(t)
	leases, locks := pb.NewLeaseServiceClient(h.conn), pb.NewLockServiceClient(h.conn)
	ofLeases := func(ctx context.Context) error {
		_, err := leases.ListLeases(ctx, new(pb.ListLeasesRequest))
		return err
	}
	ofLocks := func(ctx context.Context) error { _, err := locks.ListLocks(ctx, new(pb.ListLocksRequest)); return err }
	for kind, list := range map[listKind]struct{ waits, passes func(context.Context) error }{listLeases: {ofLeases, ofLocks}, listLocks: {ofLocks, ofLeases}} {
		turns := h.lists.turns[kind]
		if most := max(runtime.GOMAXPROCS(0)/2, 1); cap(turns) != most {
			t.Errorf("kind %d: %d lists are made at once, want %d", kind, cap(turns), most)
		}
		for range cap(turns) {
			turns <- struct{}{}
		}
		late, cancel := context.WithTimeout(testContext(t), 50*time.Millisecond)
		if err := list.waits(late); status.Code(err) != codes.DeadlineExceeded {
			t.Errorf("kind %d without a turn: %v", kind, err)
		}
		cancel()
		if err := list.passes(testContext(t)); err != nil {
			t.Errorf("beside lists of kind %d: %v", kind, err)
		}
		for range cap(turns) {
			<-turns
		}
	}
}
