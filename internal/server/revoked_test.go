package server

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/audit"
	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// The tests in this file take rights away in the middle of what they have permitted.

func only(grants ...auth.Grant) map[string][]auth.Grant {
	return map[string][]auth.Grant{"alice": grants}
}

// holdLatch holds the latch of a key until release is called, which then writes it.
func (h *harness) holdLatch(t *testing.T, key string) (release func()) {
	t.Helper()
	return h.hold(t, func(w *mvcc.Write) { w.Set([]byte(key), []byte("held")) })
}

// holdLatchOf is holdLatch for an internal key, and writes nothing.
func (h *harness) holdLatchOf(t *testing.T, internal []byte) (release func()) {
	t.Helper()
	return h.hold(t, func(w *mvcc.Write) {
		w.SetOwn()
		w.Latch(internal)
	})
}

// hold holds the latches of a write until release is called.
func (h *harness) hold(t *testing.T, fill func(*mvcc.Write)) (release func()) {
	t.Helper()
	held, let, done := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		x, err := h.store.Session()
		if err != nil {
			t.Error(err)
			close(held)
			return
		}
		defer x.Close()
		var w mvcc.Write
		fill(&w)
		w.Durability = mvcc.DurabilityAsync
		w.Under(func(*mvcc.Latched) error {
			close(held)
			<-let
			return nil
		})
		if _, err := x.Commit(context.Background(), &w); err != nil {
			t.Error(err)
		}
	}()
	<-held
	return func() { close(let); <-done }
}

// A request is checked, then waits for a latch, and its right is taken away meanwhile.
func TestRightIsCheckedAgainUnderTheLatch(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		c, ctx := clientsOf(h.conn), testContext(t)
		k := []byte("k")
		forms := map[string]func(context.Context, *clients) error{
			"put": func(ctx context.Context, c *clients) error {
				_, err := c.kv.Put(ctx, &pb.PutRequest{Key: k, Value: k})
				return err
			},
			"delete": func(ctx context.Context, c *clients) error {
				_, err := c.kv.Delete(ctx, &pb.DeleteRequest{Key: k})
				return err
			},
			"invoke": func(ctx context.Context, c *clients) error {
				_, err := c.kv.Invoke(ctx, &pb.InvokeRequest{Invocation: appended("k")})
				return err
			},
			"invoke many": func(ctx context.Context, c *clients) error {
				many := new(pb.InvokeAllRequest)
				for i := range invocationsKept {
					many.Invocations = append(many.Invocations, appended(fmt.Sprintf("k/%04d", i)))
				}
				many.Invocations = append(many.Invocations, appended("k"))
				_, err := c.kv.InvokeAll(ctx, many)
				return err
			},
			"delete range": func(ctx context.Context, c *clients) error {
				_, err := c.kv.DeleteRange(ctx, &pb.DeleteRangeRequest{Range: prefixRange("k")})
				return err
			},
			"execute":       executed(&pb.ExecuteRequest{ThenOperations: []*pb.Operation{{Operation: &pb.Operation_Invoke{Invoke: appended("k")}}}}),
			"pipelined put": inPipeline(&pb.PipelineRequest{Request: &pb.PipelineRequest_Put{Put: &pb.PutRequest{Key: k, Value: k}}}),
			"transaction":   transacted(&pb.TransactRequest{Request: &pb.TransactRequest_Write{Write: &pb.WriteRequest{Mutations: []*pb.Mutation{mutation("k", 0)}}}}),
		}
		for name, call := range forms {
			h.gate.publish(nil)
			h.put(t, "k", "v")
			h.setUsers(only(grant("rwl", "k")))
			release := h.holdLatch(t, "k")
			answered := make(chan error, 1)
			checked := h.gate.table.Load()
			go func() { answered <- call(as(ctx, "alice"), c) }()
			eventually(t, name+" is executed", func() bool {
				requests, _, _ := h.admission.inflight()
				return requests > 0 || h.Server.transactions.list() != nil
			})
			time.Sleep(5 * time.Millisecond) // most are at the latch now; the outcome is the same if not
			h.setUsers(only(grant("rwl", "j")))
			if h.gate.table.Load() == checked {
				t.Fatal("the table is the same")
			}
			release()
			if err := <-answered; !denied(err) {
				t.Errorf("%s: %v", name, err)
			}
			h.gate.publish(nil)
			if got := h.get(t, "k"); string(got.Value) != "held" {
				t.Errorf("%s: the key has %q; want what the commit wrote that held the latch", name, got.Value)
			}
		}
	})
}

// TestAFailureOfManyInvocationsIsToldWhileTheirRightStays: users have changed while the request waited, but not the rights of its sender.
func TestAFailureOfManyInvocationsIsToldWhileTheirRightStays(t *testing.T) {
	many := &pb.InvokeAllRequest{Preconditions: []*pb.Precondition{{Key: []byte("k")}}} // which is malformed
	for i := range invocationsKept + 1 {
		many.Invocations = append(many.Invocations, appended(fmt.Sprintf("k/%04d", i)))
	}
	onBothTransports(t, func(t *testing.T, h *harness) {
		for name, call := range map[string]func(context.Context, *clients) error{
			"unary": func(ctx context.Context, c *clients) error {
				_, err := c.kv.InvokeAll(ctx, many)
				return err
			},
			"pipelined": inPipeline(&pb.PipelineRequest{Request: &pb.PipelineRequest_InvokeAll{InvokeAll: many}}),
		} {
			h.setUsers(only(grant("rw", "k")))
			log, most := h.observer.audit.log, int(h.config.Audit.QueueSize)
			must(t, log.Admit(t.Context(), nil, most))
			answered := make(chan error, 1)
			go func() { answered <- call(as(testContext(t), "alice"), clientsOf(h.conn)) }()
			time.Sleep(50 * time.Millisecond) // it waits now; the outcome is the same if not
			h.setUsers(only(grant("rw", "k"), grant("r", "j")))
			log.Release(most)
			if err := <-answered; status.Code(err) != codes.InvalidArgument {
				t.Errorf("%s: %v", name, err)
			}
		}
	}, func(c *config.Config) {
		c.Audit.File, c.Audit.Classes, c.Audit.Full = filepath.Join(t.TempDir(), "audit.log"), "read,write", audit.FullBlock
	})
}

// TestAPipelineGoesOnAfterManyInvocations: what they named is not asked for any more.
func TestAPipelineGoesOnAfterManyInvocations(t *testing.T) {
	many := new(pb.InvokeAllRequest)
	for i := range invocationsKept + 1 {
		many.Invocations = append(many.Invocations, appended(fmt.Sprintf("k/%04d", i)))
	}
	onBothTransports(t, func(t *testing.T, h *harness) {
		h.setUsers(only(grant("rw", "k")))
		stream, err := h.kv.Pipeline(as(testContext(t), "alice"))
		must(t, err)
		for i, m := range []*pb.PipelineRequest{{Id: 1, Request: &pb.PipelineRequest_InvokeAll{InvokeAll: many}}, getRequest(2, "k")} {
			must(t, stream.Send(m))
			out, err := stream.Recv()
			must(t, err)
			if err := status.ErrorProto(out.GetError()); err != nil {
				t.Errorf("request %d: %v", i+1, err)
			}
		}
	})
}

func TestPipelineIsCheckedMessageByMessage(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		h.put(t, "k", "v")
		h.setUsers(only(grant("rw", "k")))
		stream, err := h.kv.Pipeline(as(testContext(t), "alice"))
		if err != nil {
			t.Fatal(err)
		}
		ask := func(want codes.Code) {
			t.Helper()
			for _, m := range []*pb.PipelineRequest{getRequest(1, "k"), putRequest(2, "k", "v", pb.Durability_DURABILITY_ASYNC)} {
				if err := stream.Send(m); err != nil {
					t.Fatal(err)
				}
				out, err := stream.Recv()
				if err != nil {
					t.Fatal(err)
				}
				if got := status.FromProto(out.GetError()).Code(); got != want {
					t.Errorf("%v: got %v, want %v", m, got, want)
				}
			}
		}
		ask(codes.OK)
		h.setUsers(only(grant("rw", "j")))
		ask(codes.PermissionDenied)
		h.setUsers(map[string][]auth.Grant{})
		ask(codes.Unauthenticated)
		h.setUsers(only(grant("rw", "k")))
		ask(codes.OK)
		h.gate.publish(nil)
		ask(codes.OK)
	})
}

func TestTransactionIsCheckedByOperationAndAsAWhole(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		h.put(t, "k", "v")
		begin := &pb.TransactRequest{Request: &pb.TransactRequest_Begin{Begin: &pb.BeginRequest{}}}
		get := &pb.TransactRequest{Request: &pb.TransactRequest_Get{Get: &pb.KeyReadRequest{Key: []byte("k")}}}
		scan := &pb.TransactRequest{Request: &pb.TransactRequest_Scan{Scan: &pb.RangeReadRequest{Range: prefixRange("k")}}}
		write := func(key string) *pb.TransactRequest {
			return &pb.TransactRequest{Request: &pb.TransactRequest_Write{Write: &pb.WriteRequest{Mutations: []*pb.Mutation{mutation(key, 0)}}}}
		}
		attach := &pb.TransactRequest{Request: &pb.TransactRequest_Write{Write: &pb.WriteRequest{Mutations: []*pb.Mutation{mutation("m", leaseOfTests)}}}}
		commit := &pb.TransactRequest{Request: &pb.TransactRequest_Commit{Commit: &pb.CommitRequest{}}}
		rollback := &pb.TransactRequest{Request: &pb.TransactRequest_Rollback{Rollback: &pb.RollbackRequest{}}}
		all := []auth.Grant{grant("rw", "k"), grant("wl", "m")}
		if _, err := clientsOf(h.conn).lease.GrantLease(testContext(t), &pb.GrantLeaseRequest{Id: leaseOfTests, Ttl: durationpb.New(time.Hour)}); err != nil {
			t.Fatal(err)
		}
		for name, row := range map[string]struct {
			before, after []*pb.TransactRequest
			then          []auth.Grant
			want          codes.Code
		}{
			"nothing changes":                        {[]*pb.TransactRequest{get, write("m"), attach}, []*pb.TransactRequest{commit}, all, codes.OK},
			"a right that it does not use":           {[]*pb.TransactRequest{get, write("m")}, []*pb.TransactRequest{commit}, []auth.Grant{grant("r", "k"), grant("w", "m")}, codes.OK},
			"an operation after":                     {[]*pb.TransactRequest{get}, []*pb.TransactRequest{get}, []auth.Grant{grant("w", "k")}, codes.PermissionDenied},
			"the right to what it wrote":             {[]*pb.TransactRequest{write("k"), write("m")}, []*pb.TransactRequest{commit}, []auth.Grant{grant("rw", "k")}, codes.PermissionDenied},
			"the right to what it read":              {[]*pb.TransactRequest{get, write("m")}, []*pb.TransactRequest{commit}, []auth.Grant{grant("w", "k"), grant("w", "m")}, codes.PermissionDenied},
			"the right to what it only read":         {[]*pb.TransactRequest{get}, []*pb.TransactRequest{commit}, []auth.Grant{grant("w", "k")}, codes.PermissionDenied},
			"the right to a range that it read":      {[]*pb.TransactRequest{scan, write("m")}, []*pb.TransactRequest{commit}, []auth.Grant{grant("w", "k"), grant("w", "m")}, codes.PermissionDenied},
			"the right to attach":                    {[]*pb.TransactRequest{attach}, []*pb.TransactRequest{commit}, []auth.Grant{grant("w", "m")}, codes.PermissionDenied},
			"another operation is checked meanwhile": {[]*pb.TransactRequest{write("k")}, []*pb.TransactRequest{write("m"), commit}, []auth.Grant{grant("w", "m")}, codes.PermissionDenied},
			"rolled back without any right":          {[]*pb.TransactRequest{write("k")}, []*pb.TransactRequest{rollback}, nil, codes.OK},
		} {
			h.setUsers(only(all...))
			stream, err := clientsOf(h.conn).txn.Transact(as(testContext(t), "alice"))
			if err != nil {
				t.Fatal(err)
			}
			do := func(m *pb.TransactRequest) error {
				if err := stream.Send(m); err != nil {
					return err
				}
				out, err := stream.Recv()
				if err != nil {
					return err
				}
				return status.ErrorProto(out.GetError())
			}
			for _, m := range append([]*pb.TransactRequest{begin}, row.before...) {
				if err := do(m); err != nil {
					t.Fatalf("%s: %v: %v", name, m, err)
				}
			}
			visible := h.store.Visible()
			h.setUsers(only(row.then...))
			for i, m := range row.after {
				want := codes.OK
				if i == len(row.after)-1 {
					want = row.want
				}
				if err := do(m); status.Code(err) != want {
					t.Errorf("%s: %v: got %v, want %v", name, m, err, want)
				}
			}
			if row.want != codes.OK && h.store.Visible() != visible {
				t.Errorf("%s: something was committed", name)
			}
			_ = stream.CloseSend()
			eventually(t, "the transaction has ended", func() bool { return len(h.Server.transactions.list()) == 0 })
		}
	})
}

func TestScanEndsWhenItsRightIsTakenAway(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		value := make([]byte, 4<<10)
		for i := range 500 { // more than windows and buffers take
			if _, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: fmt.Appendf(nil, "k%03d", i), Value: value, Durability: pb.Durability_DURABILITY_ASYNC}); err != nil {
				t.Fatal(err)
			}
		}
		for name, after := range map[string]struct {
			users map[string][]auth.Grant
			want  codes.Code
		}{
			"kept":    {only(grant("r", "k")), codes.OK},
			"reduced": {only(grant("r", "k0")), codes.PermissionDenied},
			"revoked": {map[string][]auth.Grant{}, codes.Unauthenticated},
		} {
			h.setUsers(only(grant("r", "k")))
			stream, err := h.kv.Scan(as(testContext(t), "alice"), &pb.ScanRequest{Range: prefixRange("k"), PageBytes: 8 << 10})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := stream.Recv(); err != nil {
				t.Fatal(err)
			}
			h.setUsers(after.users)
			for err == nil {
				_, err = stream.Recv()
			}
			if err.Error() == "EOF" {
				err = nil
			}
			if status.Code(err) != after.want {
				t.Errorf("%s: got %v, want %v", name, err, after.want)
			}
		}
	})
}

// A watch ends when its right does, also if nothing happens that it would show.
func TestWatchEndsWhenItsRightIsTakenAway(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		h.setUsers(only(grant("r", "a"), grant("r", "b")))
		conn := h.dial(t)
		stream, err := pb.NewFeedServiceClient(conn).Watch(as(testContext(t), "alice"))
		if err != nil {
			t.Fatal(err)
		}
		for id, prefix := range []string{1: "a", 2: "b"} {
			if prefix == "" {
				continue
			}
			if err := stream.Send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: &pb.CreateWatch{WatchId: uint64(id), Ranges: []*pb.KeyRange{prefixRange(prefix)}}}}); err != nil {
				t.Fatal(err)
			}
			if out, err := stream.Recv(); err != nil || out.GetCreated() == nil {
				t.Fatal(out, err)
			}
		}
		h.setUsers(only(grant("r", "b")))
		out, err := stream.Recv()
		if err != nil || out.WatchId != 1 || status.FromProto(out.GetEnded().GetError()).Code() != codes.PermissionDenied {
			t.Fatalf("got %v, %v; want the end of the first watch", out, err)
		}
		root := as(testContext(t), "root")
		for _, key := range []string{"a1", "b1"} {
			if _, err := h.kv.Put(root, &pb.PutRequest{Key: []byte(key)}); err != nil {
				t.Fatal(err)
			}
		}
		if out, err := stream.Recv(); err != nil || out.WatchId != 2 || string(out.GetChanges().GetCommits()[0].Events[0].Key) != "b1" {
			t.Fatalf("got %v, %v; want the event of the second watch", out, err)
		}
		h.setUsers(map[string][]auth.Grant{})
		if out, err := stream.Recv(); err != nil || status.FromProto(out.GetEnded().GetError()).Code() != codes.Unauthenticated {
			t.Fatalf("got %v, %v; want the end of the second watch", out, err)
		}
	})
}

// What a token has opened ends when the token expires, although the connection has kept it. On a busy machine a token must live
// longer so that anything can be opened with it.
func TestStreamsEndWhenTheirTokenExpires(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		h.setUsers(map[string][]auth.Grant{})
		ctx, c := as(testContext(t), "alice"), clientsOf(h.conn)
		var watch grpc.BidiStreamingClient[pb.WatchRequest, pb.WatchResponse]
		var lock grpc.ServerStreamingClient[pb.ObserveLockResponse]
		open := func() (err error) {
			if watch, err = c.feed.Watch(ctx); err == nil {
				err = watch.Send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: &pb.CreateWatch{Ranges: []*pb.KeyRange{prefixRange("k")}}}})
			}
			var created *pb.WatchResponse
			if err == nil {
				created, err = watch.Recv()
			}
			if err == nil && created.GetEnded() != nil {
				err = status.FromProto(created.GetEnded().GetError()).Err()
			}
			if err == nil {
				lock, err = c.lock.ObserveLock(ctx, &pb.ObserveLockRequest{Name: []byte("k")})
			}
			if err == nil {
				_, err = lock.Recv()
			}
			return err
		}
		inTimeOf(t, 300*time.Millisecond, func(lifetime time.Duration) error {
			table, began := makeTable(only(grant("rl", "k"))), time.Now()
			addToken(table, "alice", began.Add(lifetime))
			h.gate.publish(table)
			if err := open(); err != nil {
				return tooLate(t, began, lifetime, err)
			}
			return nil
		})
		if out, err := watch.Recv(); err != nil || status.FromProto(out.GetEnded().GetError()).Code() != codes.Unauthenticated {
			t.Errorf("watch: %v, %v", out, err)
		}
		if _, err := lock.Recv(); status.Code(err) != codes.Unauthenticated {
			t.Errorf("observed lock: %v", err)
		}
		if _, err := c.kv.Get(ctx, &pb.GetRequest{Key: []byte("k")}); status.Code(err) != codes.Unauthenticated {
			t.Errorf("get: %v", err)
		}
	})
}

// TestAWatchEndsBetweenTwoResponses: what the feed delivers at once may need many responses with previous values, and the client decides how
// long each of them takes.
func TestAWatchEndsBetweenTwoResponses(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		const keys, size = 16, 100 << 10 // two in a response
		batch := new(pb.BatchWriteRequest)
		for i := range keys {
			key := fmt.Sprintf("a%02d", i)
			h.put(t, key, string(make([]byte, size)))
			batch.Mutations = append(batch.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: []byte(key)})
		}
		out, err := h.kv.BatchWrite(testContext(t), batch)
		if err != nil {
			t.Fatal(err)
		}
		h.setUsers(only(grant("r", "a")))
		conn := h.dial(t, grpc.WithStaticStreamWindowSize(64<<10), grpc.WithStaticConnWindowSize(64<<10))
		stream, err := pb.NewFeedServiceClient(conn).Watch(as(testContext(t), "alice"))
		if err != nil {
			t.Fatal(err)
		}
		if err := stream.Send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: &pb.CreateWatch{
			Ranges: []*pb.KeyRange{prefixRange("a")}, Values: pb.WatchValues_WATCH_VALUES_NEW_AND_PREVIOUS, Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: out.Epoch - 1},
		}}}); err != nil {
			t.Fatal(err)
		}
		for events := 0; ; {
			m, err := stream.Recv()
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range m.GetChanges().GetCommits() {
				if events == 0 {
					h.setUsers(only(grant("r", "b")))
				}
				events += len(c.Events)
			}
			if ended := m.GetEnded(); ended != nil {
				if code := status.FromProto(ended.Error).Code(); code != codes.PermissionDenied || events == 0 || events > keys/2 {
					t.Errorf("%v after %d of %d events; the right has ended after the first response", code, events, keys)
				}
				return
			}
			if events == keys {
				t.Fatal("all events have come")
			}
		}
	}, func(c *config.Config) { c.Retention = time.Minute })
}

func TestObservedLockEndsWhenItsRightIsTakenAway(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		h.setUsers(only(grant("r", "k")))
		stream, err := clientsOf(h.conn).lock.ObserveLock(as(testContext(t), "alice"), &pb.ObserveLockRequest{Name: []byte("k")})
		if err == nil {
			_, err = stream.Recv()
		}
		if err != nil {
			t.Fatal(err)
		}
		h.setUsers(only(grant("r", "j")))
		if _, err := stream.Recv(); !denied(err) {
			t.Errorf("got %v", err)
		}
	})
}

// TestALockIsNotObservedAfterItsRightWasTakenAway: its holder changes at once after that.
func TestALockIsNotObservedAfterItsRightWasTakenAway(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		h.setUsers(only(grant("r", "k")))
		root := as(testContext(t), "root")
		_, err := clientsOf(h.conn).lease.GrantLease(root, &pb.GrantLeaseRequest{Id: 1, Ttl: durationpb.New(time.Hour)})
		must(t, err)
		const rounds, observers = 10, 30
		for i := range rounds {
			table := h.setUsers(only(grant("r", "k")))
			name := fmt.Appendf(nil, "k%d", i)
			var observed [observers]grpc.ServerStreamingClient[pb.ObserveLockResponse]
			for n := range observed {
				observed[n], err = clientsOf(h.conn).lock.ObserveLock(as(testContext(t), "alice"), &pb.ObserveLockRequest{Name: name})
				must(t, err)
				_, err = observed[n].Recv()
				must(t, err)
			}
			h.gate.publish(nextTable(table, func(t *auth.Table) { t.Users["alice"] = &auth.User{Name: "alice", Rights: auth.Compile(nil)} }))
			_, err = clientsOf(h.conn).lock.AcquireLock(root, &pb.AcquireLockRequest{Name: name, LeaseId: 1, Value: []byte("secret")})
			must(t, err)
			for _, stream := range observed {
				if out, err := stream.Recv(); !denied(err) {
					t.Fatalf("got %v, %v", out, err)
				}
			}
		}
	})
}

func TestBulkLoadIsCheckedAsAWholeWhenItCommits(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		many := []auth.Grant{grant("w", "k"), grant("w", "m")}
		for i := range loadedSpansMax { // more ranges than a load keeps apart
			many = append(many, grant("w", fmt.Sprintf("s%03d.", i)))
		}
		manyKeys := []string{"k1", "k2", "m1"}
		for i := range loadedSpansMax {
			manyKeys = append(manyKeys, fmt.Sprintf("s%03d.x", i))
		}
		two := []auth.Grant{grant("w", "k"), grant("w", "m")}
		for name, row := range map[string]struct {
			before []auth.Grant
			keys   []string
			then   []auth.Grant
			want   codes.Code
		}{
			"kept":                           {[]auth.Grant{grant("w", "k")}, []string{"k1", "k2"}, []auth.Grant{grant("w", "k")}, codes.OK},
			"the first":                      {[]auth.Grant{grant("w", "k")}, []string{"k1", "k2"}, []auth.Grant{grant("w", "k2")}, codes.PermissionDenied},
			"the user":                       {[]auth.Grant{grant("w", "k")}, []string{"k1", "k2"}, nil, codes.PermissionDenied},
			"two ranges kept":                {two, []string{"k1", "m1", "k2"}, two, codes.OK},
			"two ranges widened":             {two, []string{"k1", "m1", "k2"}, []auth.Grant{grant("w", "")}, codes.OK},
			"two ranges reduced to the keys": {two, []string{"k1", "m1", "k1"}, []auth.Grant{grant("w", "k1"), grant("w", "m1")}, codes.OK},
			"the first range":                {two, []string{"k1", "m1", "k2"}, []auth.Grant{grant("w", "m")}, codes.PermissionDenied},
			"the second range":               {two, []string{"k1", "m1", "k2"}, []auth.Grant{grant("w", "k")}, codes.PermissionDenied},
			"between keys of one range":      {two, []string{"k1", "m1", "k3"}, []auth.Grant{grant("w", "k1"), grant("w", "k3"), grant("w", "m")}, codes.PermissionDenied},
			"too many ranges":                {many, manyKeys, many, codes.PermissionDenied}, // the last ones are as one
			"too many ranges, all":           {many, manyKeys, []auth.Grant{grant("w", "")}, codes.OK},
		} {
			load := func(wait time.Duration) codes.Code {
				h.setUsers(only(row.before...))
				stream, err := h.kv.BulkLoad(as(testContext(t), "alice"))
				if err != nil {
					t.Fatal(err)
				}
				for _, key := range row.keys {
					if err := stream.Send(&pb.BulkLoadRequest{Entries: []*pb.BulkEntry{{Key: []byte(key)}}}); err != nil {
						t.Fatal(err)
					}
				}
				time.Sleep(wait) // the messages are checked now; a test with the later rights may refuse them, or allow them
				h.setUsers(only(row.then...))
				_ = stream.Send(&pb.BulkLoadRequest{Commit: true})
				_, err = stream.CloseAndRecv()
				return status.Code(err)
			}
			wait := 20 * time.Millisecond
			got := load(wait)
			for got == codes.OK && row.want != codes.OK && wait < 2*time.Second { // perhaps they were not checked yet
				wait *= 4
				got = load(wait)
			}
			if got != row.want {
				t.Errorf("%s: got %v, want %v", name, got, row.want)
			}
		}
	})
}

// A key that the caller could not write when the load began is not forgotten when the right to it is taken away again.
func TestBulkLoadIsCheckedWithRightsThatCameMeanwhile(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		h.setUsers(only(grant("w", "k")))
		stream, err := h.kv.BulkLoad(as(testContext(t), "alice"))
		if err != nil {
			t.Fatal(err)
		}
		send := func(m *pb.BulkLoadRequest) {
			if err := stream.Send(m); err != nil {
				t.Fatal(err)
			}
			time.Sleep(20 * time.Millisecond) // it is checked now
		}
		send(&pb.BulkLoadRequest{Entries: []*pb.BulkEntry{{Key: []byte("k1")}}})
		h.setUsers(only(grant("w", "k"), grant("w", "m")))
		send(&pb.BulkLoadRequest{Entries: []*pb.BulkEntry{{Key: []byte("m1")}}})
		h.setUsers(only(grant("w", "k")))
		_ = stream.Send(&pb.BulkLoadRequest{Commit: true})
		if _, err := stream.CloseAndRecv(); !denied(err) {
			t.Errorf("got %v", err)
		}
	})
}

// TestASecondBeginForgetsNoOperation: a begin in an open transaction is refused, and the transaction goes on after a rollback to a
// savepoint. What was written before with a right that is gone is not committed.
func TestASecondBeginForgetsNoOperation(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		begin := &pb.TransactRequest{Request: &pb.TransactRequest_Begin{Begin: &pb.BeginRequest{}}}
		write := &pb.TransactRequest{Request: &pb.TransactRequest_Write{Write: &pb.WriteRequest{Mutations: []*pb.Mutation{mutation("k", 0)}}}}
		savepoint := &pb.TransactRequest{Request: &pb.TransactRequest_Savepoint{Savepoint: &pb.SavepointRequest{}}}
		back := &pb.TransactRequest{Request: &pb.TransactRequest_RollbackTo{RollbackTo: &pb.RollbackToRequest{Savepoint: 1}}}
		commit := &pb.TransactRequest{Request: &pb.TransactRequest_Commit{Commit: &pb.CommitRequest{}}}
		for _, before := range []map[string][]auth.Grant{only(grant("w", "k")), nil} { // nil: users are not checked
			h.gate.publish(nil)
			if before != nil {
				h.setUsers(before)
			}
			stream, err := clientsOf(h.conn).txn.Transact(as(testContext(t), "alice"))
			if err != nil {
				t.Fatal(err)
			}
			do := func(m *pb.TransactRequest, want codes.Code) {
				t.Helper()
				if err := stream.Send(m); err != nil {
					t.Fatal(err)
				}
				out, err := stream.Recv()
				if err != nil {
					t.Fatal(err)
				}
				if err := status.ErrorProto(out.GetError()); status.Code(err) != want {
					t.Errorf("%v: got %v, want %v", m, err, want)
				}
			}
			do(begin, codes.OK)
			do(write, codes.OK)
			do(savepoint, codes.OK)
			h.setUsers(only(grant("w", "j")))
			do(begin, codes.FailedPrecondition)
			do(back, codes.OK)
			do(commit, codes.PermissionDenied)
			h.gate.publish(nil)
			if h.get(t, "k").Found {
				t.Error("the key was written")
			}
			_ = stream.CloseSend()
		}
	})
}

// TestKeysOfALeaseShowNoKeyAttachedMeanwhile: another user attaches a key and detaches it, while the owner of the lease asks for its keys.
func TestKeysOfALeaseShowNoKeyAttachedMeanwhile(t *testing.T) {
	h := mustStart(t)
	h.setUsers(map[string][]auth.Grant{"eve": {grant("rwl", "eve/")}})
	c, ctx := clientsOf(h.conn), testContext(t)
	granted, err := c.lease.GrantLease(as(ctx, "eve"), &pb.GrantLeaseRequest{Ttl: durationpb.New(time.Hour)})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	defer func() { <-done }()
	until, stop := context.WithCancel(ctx)
	defer stop()
	other := clientsOf(h.dial(t))
	go func() {
		defer close(done)
		for until.Err() == nil {
			_, _ = other.kv.Put(as(until, "root"), &pb.PutRequest{Key: []byte("secret"), LeaseId: granted.Id, Durability: pb.Durability_DURABILITY_ASYNC})
			_, _ = other.kv.Delete(as(until, "root"), &pb.DeleteRequest{Key: []byte("secret"), Durability: pb.Durability_DURABILITY_ASYNC})
		}
	}()
	refused := 0
	for begun := time.Now(); refused == 0 || time.Since(begun) < time.Second; {
		out, err := c.lease.GetLease(as(ctx, "eve"), &pb.GetLeaseRequest{Id: granted.Id, Keys: 10})
		switch {
		case err != nil:
			failureOf(t, err).want(t, codes.NotFound, pb.ErrorReason_ERROR_REASON_LEASE_NOT_FOUND, "lease")
			refused++
		case len(out.Keys) > 0:
			t.Fatalf("a user is shown the key %q, to which it has no right", out.Keys)
		}
	}
}

// TestWorkOfHoursEndsWithItsRight: the right to a backup, or to a verification, is taken away while it is under way. It ends, and with it what
// its caller gets.
func TestWorkOfHoursEndsWithItsRight(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		for i := range 40 {
			h.put(t, fmt.Sprintf("key-%d", i), string(make([]byte, 100_000)))
		}
		if err := h.store.Checkpoint(testContext(t)); err != nil {
			t.Fatal(err)
		}
		ctx := as(testContext(t), "operator")
		for name, begin := range map[string]func() (func() error, error){
			"backup": func() (func() error, error) {
				stream, err := pb.NewBackupServiceClient(h.conn).CreateBackup(ctx, &pb.CreateBackupRequest{Target: t.TempDir(), Bandwidth: 100_000})
				return func() error { _, err := stream.Recv(); return err }, err
			},
			"verification": func() (func() error, error) {
				stream, err := h.admin.Verify(ctx, &pb.VerifyRequest{PagesPerSecond: 10})
				return func() error { _, err := stream.Recv(); return err }, err
			},
		} {
			h.setUsers(map[string][]auth.Grant{"operator": {action(auth.ActionBackup)}})
			receive, err := begin()
			if err == nil {
				err = receive() // progress
			}
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			h.setUsers(map[string][]auth.Grant{"operator": nil})
			for err == nil {
				err = receive()
			}
			if !denied(err) {
				t.Errorf("%s: %v", name, err)
			}
		}
		eventually(t, "no backup is made", func() bool { return h.snapshots.backups.progress() == nil })
	})
}

// lateLoad is the stream of a bulk load whose first message was permitted, before the right to it was taken away. The rest of the server
// looks at the users after that, if it has not done so before.
type lateLoad struct {
	grpc.ClientStreamingServer[pb.BulkLoadRequest, pb.BulkLoadResponse]
	ctx      context.Context
	change   func()
	received chan struct{}
}

func (l *lateLoad) Context() context.Context {
	select {
	case <-l.received:
	case <-time.After(20 * time.Millisecond): // nothing is received yet
	}
	return l.ctx
}

func (l *lateLoad) RecvMsg(m any) error {
	select {
	case <-l.received: // there is no second one
		<-l.ctx.Done()
		return l.ctx.Err()
	default:
	}
	r := m.(*bulkMessage) //nolint:forcetypeassert // there is no other kind
	r.Entries, r.Commit = []*pb.BulkEntry{{Key: []byte("k")}}, true
	l.change()
	close(l.received)
	return nil
}

// TestTheFirstMessageOfABulkLoadIsCheckedAgain: its right may be taken away while the load begins.
func TestTheFirstMessageOfABulkLoadIsCheckedAgain(t *testing.T) {
	h := mustStart(t)
	h.setUsers(only(grant("w", "k")))
	a := &access{gate: &h.gate, conn: new(connection), header: "Bearer alice"}
	stream := &lateLoad{
		ctx: context.WithValue(t.Context(), accessKey{}, a), change: func() { h.setUsers(only(grant("w", "j"))) }, received: make(chan struct{}),
	}
	o := h.openSnapshot(t.Context(), pb.SnapshotInfo_KIND_BULK_LOAD, h.store.Visible(), nil)
	defer o.close()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	loaded, err := (&kvService{Server: h.Server}).bulkLoad(ctx, o, stream, new(time.Duration))
	if !isDenial(err) {
		t.Errorf("loaded %d keys: %v", loaded.Keys, err)
	}
}

// TestWhatWaitsIsCheckedWithUsersThatAreCheckedMeanwhile: a request for a lock, which may wait for hours, gets it with a right only.
func TestWhatWaitsIsCheckedWithUsersThatAreCheckedMeanwhile(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		h.gate.publish(nil)
		c, name := clientsOf(h.conn), []byte("k")
		mustGrantLease(t, c.lease, 1, time.Hour)
		mustGrantLease(t, c.lease, 2, time.Hour)
		held := mustLock(t, h, "k", 1)
		for _, user := range []string{"nobody", "alice"} {
			answered := make(chan error, 1)
			go func() {
				_, err := c.lock.AcquireLock(as(testContext(t), user), &pb.AcquireLockRequest{Name: name, LeaseId: 2, Wait: durationpb.New(time.Hour)})
				answered <- err
			}()
			eventually(t, "it waits", func() bool { return h.leases.Stats().Waiters == 1 })
			h.setUsers(only(grant("rwl", "k")))
			if released, _, err := h.leases.Release(testContext(t), name, keys.Epoch(held)); err != nil || !released {
				t.Fatal(released, err)
			}
			err := <-answered
			if user == "alice" {
				must(t, err)
				continue
			}
			if status.Code(err) != codes.Unauthenticated {
				t.Errorf("%s: %v", user, err)
			}
			h.gate.publish(nil)
			held = mustLock(t, h, "k", 1)
		}
	})
}
