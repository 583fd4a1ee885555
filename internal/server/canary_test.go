package server

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/testseed"
)

var rightsRounds = flag.Int("rights.rounds", 12, "rounds of TestAnswersDoNotDependOnWhatTheCallerMayNotRead, each with a role of its own")

// TestAnswersDoNotDependOnWhatTheCallerMayNotRead: two servers differ only in keys that a user may not read: whether they exist, their
// values, and what happens to them. The user sends random requests to both, and gets the same answers: entries, counts, errors,
// metadata, events. So nothing that the user gets depends on those keys.
func TestAnswersDoNotDependOnWhatTheCallerMayNotRead(t *testing.T) {
	testseed.SkipUnderRace(t)
	seed := testseed.Base(t)
	for _, kind := range []config.Transport{config.TransportDirect, config.TransportGRPC} {
		t.Run(string(kind), func(t *testing.T) {
			adjust := func(c *config.Config) { c.Transport = kind; retainingQuietly(c) }
			w := &twins{t: t, rnd: rand.New(rand.NewPCG(seed, 1)), seen: map[string]int{}}
			for i := range w.sides {
				h := mustStart(t, adjust)
				w.sides[i] = &twin{h: h, c: clientsOf(h.conn), root: clientsOf(h.dial(t)), ids: map[string][]byte{}}
			}
			for round := range *rightsRounds {
				w.round(round)
				if t.Failed() {
					t.Fatalf("the seed is %d, the round %d", seed, round)
				}
			}
			for _, name := range []string{"OK", "PermissionDenied"} {
				if w.seen[name] < 20**rightsRounds {
					t.Errorf("only %d requests ended with %s: %v", w.seen[name], name, w.seen)
				}
			}
		})
	}
}

// twins are two servers and a user.
type twins struct {
	t     *testing.T
	rnd   *rand.Rand
	sides [2]*twin
	space string // what the keys of the round begin with
	lease uint64
	role  []auth.Grant
	seen  map[string]int // requests by their codes
}

type twin struct {
	h      *harness
	c      *clients
	root   *clients          // of another user, on a connection of its own: the connection of c knows only the user
	epochs []uint64          // at which the contents were set
	token  []byte            // that the last answer had
	ids    map[string][]byte // of requests of other users
}

const canaryKeys = 20

func (w *twins) key(i int) []byte  { return fmt.Appendf(nil, "%s%c%d", w.space, 'a'+i/5, i%5) }
func (w *twins) anyKey() []byte    { return w.key(w.rnd.IntN(canaryKeys)) }
func (w *twins) chance(n int) bool { return w.rnd.IntN(n) == 0 }

// anyRange is a range of the round: a prefix, two keys, or from a key on.
func (w *twins) anyRange() *pb.KeyRange {
	switch w.rnd.IntN(5) {
	case 0:
		return &pb.KeyRange{Start: w.anyKey()}
	case 1:
		return &pb.KeyRange{Prefix: w.anyKey()}
	case 2:
		return &pb.KeyRange{Prefix: []byte(w.space)}
	case 3:
		return &pb.KeyRange{Prefix: w.anyKey()[:len(w.space)+1]}
	}
	a, b := w.anyKey(), w.anyKey()
	if bytes.Compare(a, b) > 0 {
		a, b = b, a
	}
	return &pb.KeyRange{Start: a, End: append(b, 0)}
}

// anyRole is a role with rights to some ranges of the round.
func (w *twins) anyRole() (role []auth.Grant) {
	for range 2 + w.rnd.IntN(4) {
		b, _ := toBounds(w.anyRange())
		if b.upper == nil && !w.chance(4) {
			continue
		}
		role = append(role, auth.Grant{Lower: b.lower, Upper: b.upper, Read: w.chance(2), Write: w.chance(2), Lease: w.chance(2)})
	}
	return role
}

// round gives the user a role, sends requests, takes some of the rights away, and sends more.
func (w *twins) round(n int) {
	w.space, w.lease = fmt.Sprintf("%06d/", n), uint64(1000+n)
	for _, s := range w.sides {
		s.epochs, s.token = nil, nil
		s.h.gate.publish(nil)
		if _, err := s.c.lease.GrantLease(testContext(w.t), &pb.GrantLeaseRequest{Id: w.lease, Ttl: durationpb.New(time.Hour)}); err != nil {
			w.t.Fatal(err)
		}
	}
	w.setRole(w.anyRole())
	p := w.openPipelines()
	for range 50 {
		w.request()
	}
	w.usePipelines(p)
	if len(w.role) > 0 {
		i := w.rnd.IntN(len(w.role))
		w.setRole(append(append([]auth.Grant{}, w.role[:i]...), w.role[i+1:]...))
	}
	w.usePipelines(p)
	for range 15 {
		w.request()
	}
}

// mayRead reports whether the user may read a key, as a search through the list of grants.
func (w *twins) mayRead(key []byte) bool {
	for _, g := range w.role {
		if g.Read && within(key, g.Lower, g.Upper) {
			return true
		}
	}
	return false
}

// setRole changes the role, and then everything that the user may not read.
func (w *twins) setRole(role []auth.Grant) {
	w.role = role
	for _, s := range w.sides {
		s.h.setUsers(map[string][]auth.Grant{"user": role})
	}
	w.disturb()
}

// disturb writes every key as another user: equally where the user may read, and differently elsewhere.
func (w *twins) disturb() {
	writes := [2]*pb.BatchWriteRequest{{}, {}}
	for i := range canaryKeys {
		key, exists, value := w.key(i), w.chance(2), fmt.Appendf(nil, "value %d", w.rnd.IntN(100))
		readable := w.mayRead(key)
		for side := range w.sides {
			m := &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: key, Value: value}
			if !readable {
				m.Value = fmt.Appendf(nil, "CANARY %d %s", side, value)
			}
			if exists == (readable || side == 0) {
				m.LeaseId = w.lease * uint64(w.rnd.IntN(2)) * uint64(i%2)
			} else if !exists || !readable {
				m = &pb.Mutation{Kind: pb.Mutation_KIND_DELETE, Key: key}
			}
			if readable {
				m.LeaseId = 0
			}
			writes[side].Mutations = append(writes[side].Mutations, m)
		}
	}
	for side, s := range w.sides {
		ctx := as(testContext(w.t), "root")
		out, err := s.root.kv.BatchWrite(ctx, writes[side])
		if err != nil {
			w.t.Fatal(err)
		}
		s.epochs = append(s.epochs, out.Epoch)
	}
	id := w.newID()
	for side, s := range w.sides { // a request of which the record has a canary
		_, err := s.root.kv.Invoke(as(testContext(w.t), "root"), &pb.InvokeRequest{RequestId: id, Invocation: &pb.Invocation{
			Key: []byte("!"), Operation: &pb.Invocation_GetAndSet{GetAndSet: fmt.Appendf(nil, "CANARY %d", side)}, ReturnOld: true, ReturnNew: true,
		}})
		if err != nil {
			w.t.Fatal(err)
		}
		s.ids["root"] = id
	}
}

func (w *twins) newID() []byte {
	id := make([]byte, 16)
	ms := uint64(time.Now().UnixMilli())
	for i := range 6 {
		id[i] = byte(ms >> (40 - 8*i))
	}
	for i := 6; i < 16; i++ {
		id[i] = byte(w.rnd.Uint32())
	}
	id[6], id[8] = id[6]&15|0x70, id[8]&63|0x80
	return id
}

// answers are what a request has brought: messages, and an error.
type answers struct {
	list []proto.Message
	err  error
}

// request sends a random request to both servers, and compares the answers.
func (w *twins) request() {
	name, send := w.anyRequest()
	w.compare(name, func(s *twin) answers { return send(as(testContext(w.t), "user"), s) })
}

func (w *twins) compare(name string, send func(*twin) answers) {
	w.t.Helper()
	var texts [2]string
	for i, s := range w.sides {
		a := send(s)
		s.token = nil
		for _, m := range a.list {
			w.refuseCanary(name, m)
			s.noteToken(m)
		}
		if st := status.Convert(a.err); a.err != nil {
			w.refuseCanary(name, st.Proto())
		}
		texts[i] = describe(a)
		w.seen[status.Code(a.err).String()]++
	}
	if texts[0] != texts[1] {
		w.t.Errorf("%s as a user with %v:\n%s\n--- the other server:\n%s", name, rolesText(w.role), texts[0], texts[1])
	}
}

func rolesText(role []auth.Grant) (s string) {
	for _, g := range role {
		s += fmt.Sprintf("[%q,%q) read %v write %v lease %v; ", g.Lower, g.Upper, g.Read, g.Write, g.Lease)
	}
	return s
}

// refuseCanary looks for the text of a value that the user may not read.
func (w *twins) refuseCanary(name string, m proto.Message) {
	if b, err := proto.Marshal(m); err != nil || bytes.Contains(b, []byte("CANARY")) {
		w.t.Errorf("%s as a user with %v reveals a canary: %v %v", name, rolesText(w.role), prototext.Format(m), err)
	}
}

func (s *twin) noteToken(m proto.Message) {
	if r, ok := m.(interface{ GetResumeToken() []byte }); ok && len(r.GetResumeToken()) > 0 {
		s.token = r.GetResumeToken()
	}
}

// describe is the text of answers without what differs from server to server: epochs, times, tokens.
func describe(a answers) string {
	var text strings.Builder
	for _, m := range a.list {
		m = proto.Clone(m)
		scrub(m.ProtoReflect())
		b, _ := proto.MarshalOptions{Deterministic: true}.Marshal(m)
		fmt.Fprintf(&text, "%s %x\n", strings.Join(strings.Fields(prototext.Format(m)), " "), b)
	}
	if a.err != nil {
		st := status.Convert(a.err)
		fmt.Fprintf(&text, "%v: %s\n", st.Code(), withoutDigits(st.Message()))
		for _, d := range st.Details() {
			if info, ok := d.(*errdetails.ErrorInfo); ok {
				fmt.Fprintf(&text, "%s %s key %q\n", info.Reason, info.Metadata["right"], info.Metadata["key"])
			}
		}
	}
	return text.String()
}

func withoutDigits(s string) string {
	return strings.Map(func(r rune) rune {
		if r >= '0' && r <= '9' {
			return -1
		}
		return r
	}, s)
}

var scrubbed = []string{"epoch", "time", "token", "lineage", "granted", "remaining", "expires"}

func scrub(m protoreflect.Message) {
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		name := string(f.Name())
		for _, s := range scrubbed {
			if strings.Contains(name, s) {
				m.Clear(f)
				if f.Kind() == protoreflect.BytesKind { // whether there is one is compared
					m.Set(f, protoreflect.ValueOfBytes([]byte("x")))
				}
				return true
			}
		}
		switch {
		case f.Message() == nil, f.IsMap():
		case f.IsList():
			for i := range v.List().Len() {
				scrub(v.List().Get(i).Message())
			}
		case string(f.Message().FullName()) == "google.rpc.Status": // an error in a message
			m.Clear(f)
		default:
			scrub(v.Message())
		}
		return true
	})
}

func one(m proto.Message, err error) answers {
	if err != nil {
		return answers{err: err}
	}
	return answers{list: []proto.Message{m}}
}

func received[M proto.Message](recv func() (M, error), err error, most int) (a answers) {
	for i := 0; err == nil && i < most; i++ {
		var m M
		if m, err = recv(); err == nil {
			a.list = append(a.list, m)
		}
	}
	if err != nil && !errors.Is(err, io.EOF) {
		a.err = err
	}
	return a
}

func (w *twins) preconditions() (list []*pb.Precondition) {
	for range w.rnd.IntN(4) / 2 {
		p := &pb.Precondition{Key: w.anyKey(), Condition: &pb.Precondition_Exists{Exists: w.chance(2)}}
		switch w.rnd.IntN(4) {
		case 0:
			p.Condition = &pb.Precondition_ValueEquals{ValueEquals: []byte("value 1")}
		case 1:
			p = &pb.Precondition{Condition: &pb.Precondition_Fence{Fence: &pb.Fence{Name: w.anyKey(), Token: 1}}}
		}
		list = append(list, p)
	}
	return list
}

func (w *twins) mutation() *pb.Mutation {
	if w.chance(3) {
		return &pb.Mutation{Kind: pb.Mutation_KIND_DELETE, Key: w.anyKey()}
	}
	m := &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: w.anyKey(), Value: []byte("own")}
	if w.chance(4) {
		m.LeaseId = w.lease
	}
	return m
}

func (w *twins) invocation() *pb.Invocation {
	i := &pb.Invocation{Key: w.anyKey(), ReturnOld: w.chance(2), ReturnNew: w.chance(2)}
	switch w.rnd.IntN(4) {
	case 0:
		i.Operation = &pb.Invocation_Append{Append: []byte("+")}
	case 1:
		i.Operation = &pb.Invocation_PutIfAbsent{PutIfAbsent: []byte("own")}
	case 2:
		i.Operation = &pb.Invocation_GetAndSet{GetAndSet: []byte("own")}
	default:
		i.Operation = &pb.Invocation_GetAndDelete{GetAndDelete: true}
	}
	return i
}

func (w *twins) operations() (list []*pb.Operation) {
	for range w.rnd.IntN(3) {
		o := &pb.Operation{}
		switch w.rnd.IntN(5) {
		case 0:
			o.Operation = &pb.Operation_Get{Get: &pb.KeyReadRequest{Key: w.anyKey()}}
		case 1:
			o.Operation = &pb.Operation_Scan{Scan: &pb.RangeReadRequest{Range: w.anyRange(), KeysOnly: w.chance(2), Limit: uint64(w.rnd.IntN(3))}}
		case 2:
			o.Operation = &pb.Operation_Write{Write: w.mutation()}
		case 3:
			o.Operation = &pb.Operation_DeleteRange{DeleteRange: &pb.RangeDeleteRequest{Range: w.anyRange()}}
		default:
			o.Operation = &pb.Operation_Invoke{Invoke: w.invocation()}
		}
		list = append(list, o)
	}
	return list
}

func (w *twins) conditions() (list []*pb.TxnCondition) {
	for _, p := range w.preconditions() {
		list = append(list, &pb.TxnCondition{Condition: &pb.TxnCondition_Key{Key: p}})
	}
	if w.chance(3) {
		list = append(list, &pb.TxnCondition{Condition: &pb.TxnCondition_Range{Range: &pb.RangeCondition{Range: w.anyRange(), Condition: &pb.RangeCondition_Empty{Empty: true}}}})
	}
	return list
}

// pipelineMessage is a random request in the form of pipelines.
func (w *twins) pipelineMessage() *pb.PipelineRequest {
	switch w.rnd.IntN(8) {
	case 0:
		return &pb.PipelineRequest{Request: &pb.PipelineRequest_Get{Get: &pb.GetRequest{Key: w.anyKey()}}}
	case 1:
		m := w.mutation()
		return &pb.PipelineRequest{Request: &pb.PipelineRequest_Put{Put: &pb.PutRequest{Key: m.Key, Value: m.Value, LeaseId: m.LeaseId, Preconditions: w.preconditions()}}}
	case 2:
		return &pb.PipelineRequest{Request: &pb.PipelineRequest_Delete{Delete: &pb.DeleteRequest{Key: w.anyKey(), Preconditions: w.preconditions(), ReturnCurrent: w.chance(2)}}}
	case 3:
		return &pb.PipelineRequest{Request: &pb.PipelineRequest_BatchGet{BatchGet: &pb.BatchGetRequest{Keys: [][]byte{w.anyKey(), w.anyKey()}}}}
	case 4:
		return &pb.PipelineRequest{Request: &pb.PipelineRequest_BatchWrite{BatchWrite: &pb.BatchWriteRequest{Mutations: []*pb.Mutation{w.mutation()}, Preconditions: w.preconditions(), ReturnCurrent: w.chance(2)}}}
	case 5:
		return &pb.PipelineRequest{Request: &pb.PipelineRequest_DeleteRange{DeleteRange: &pb.DeleteRangeRequest{Range: w.anyRange(), Limit: uint64(w.rnd.IntN(3)), Preconditions: w.preconditions()}}}
	case 6:
		return &pb.PipelineRequest{Request: &pb.PipelineRequest_Invoke{Invoke: &pb.InvokeRequest{Invocation: w.invocation(), Preconditions: w.preconditions(), ReturnCurrent: w.chance(2)}}}
	}
	return &pb.PipelineRequest{Request: &pb.PipelineRequest_InvokeAll{InvokeAll: &pb.InvokeAllRequest{Invocations: []*pb.Invocation{w.invocation()}}}}
}

// anyRequest is a random request of any method with data, and the method's name.
func (w *twins) anyRequest() (string, func(context.Context, *twin) answers) {
	n := w.rnd.IntN(18)
	switch n {
	case 0, 1, 2:
		return w.unaryRequest()
	case 3:
		r := &pb.ScanRequest{Range: w.anyRange(), Reverse: w.chance(2), CountOnly: w.chance(4), KeysOnly: w.chance(4), Limit: uint64(w.rnd.IntN(4)), Tokens: pb.ResumeTokens_RESUME_TOKENS_ALL}
		again := w.chance(2)
		return fmt.Sprint("scan ", r), func(ctx context.Context, s *twin) answers {
			stream, err := s.c.kv.Scan(ctx, r)
			a := received(func() (*pb.ScanResponse, error) { return stream.Recv() }, err, 100)
			for _, m := range a.list {
				s.noteToken(m)
			}
			if !again || len(s.token) == 0 {
				return a
			}
			more := proto.Clone(r).(*pb.ScanRequest)
			more.ResumeToken = s.token
			stream, err = s.c.kv.Scan(ctx, more)
			b := received(func() (*pb.ScanResponse, error) { return stream.Recv() }, err, 100)
			return answers{append(a.list, b.list...), b.err}
		}
	case 4:
		r := &pb.ExecuteRequest{Conditions: w.conditions(), ThenOperations: w.operations(), ElseOperations: w.operations()}
		return fmt.Sprint("execute ", r), func(ctx context.Context, s *twin) answers { return one(s.c.txn.Execute(ctx, r)) }
	case 5:
		r := &pb.HistoryRequest{Range: w.anyRange(), KeysOnly: w.chance(3), Limit: uint32(w.rnd.IntN(6))}
		if w.chance(2) {
			r.Key, r.Range = w.anyKey(), nil
		}
		return fmt.Sprint("history ", r), func(ctx context.Context, s *twin) answers { return one(s.c.feed.History(ctx, r)) }
	case 6:
		r := &pb.DiffRequest{Range: w.anyRange(), KeysOnly: w.chance(3), Limit: uint32(w.rnd.IntN(6))}
		return fmt.Sprint("diff ", r), func(ctx context.Context, s *twin) answers {
			r := proto.Clone(r).(*pb.DiffRequest)
			r.FromEpoch = s.epochs[0]
			return one(s.c.feed.Diff(ctx, r))
		}
	case 7, 8:
		return w.watchRequest()
	case 9, 10:
		return w.transaction()
	case 11:
		key := w.anyKey()
		switch w.rnd.IntN(4) {
		case 3:
			b, _ := toBounds(w.anyRange())
			r := &pb.ListLocksRequest{Start: b.lower, End: b.upper, Limit: uint32(w.rnd.IntN(3))}
			return fmt.Sprint("list locks ", r), func(ctx context.Context, s *twin) answers { return one(s.c.lock.ListLocks(ctx, r)) }
		case 0:
			return "get lock", func(ctx context.Context, s *twin) answers {
				return one(s.c.lock.GetLock(ctx, &pb.GetLockRequest{Name: key}))
			}
		case 1:
			return "release lock", func(ctx context.Context, s *twin) answers {
				return one(s.c.lock.ReleaseLock(ctx, &pb.ReleaseLockRequest{Name: key, Token: 1}))
			}
		}
		return "acquire lock", func(ctx context.Context, s *twin) answers {
			return one(s.c.lock.AcquireLock(ctx, &pb.AcquireLockRequest{Name: key, LeaseId: w.lease, Attempt: 5}))
		}
	case 12:
		r := &pb.GetLeaseRequest{Id: w.lease + uint64(w.rnd.IntN(2)), Keys: uint32(w.rnd.IntN(3))}
		return fmt.Sprint("get lease ", r), func(ctx context.Context, s *twin) answers { return w.sameLease(one(s.c.lease.GetLease(ctx, r))) }
	case 13:
		fence := w.chance(2)
		return "get outcome", func(ctx context.Context, s *twin) answers {
			return one(s.c.txn.GetOutcome(ctx, &pb.GetOutcomeRequest{RequestId: s.ids["root"], Fence: fence}))
		}
	case 14:
		return "retry of another user's request", func(ctx context.Context, s *twin) answers {
			return one(s.c.kv.Put(ctx, &pb.PutRequest{Key: w.key(0), RequestId: s.ids["root"]}))
		}
	case 15:
		m := w.pipelineMessage()
		entries := &pb.BulkLoadRequest{Entries: []*pb.BulkEntry{{Key: w.anyKey(), Value: []byte("own")}, {Key: w.anyKey()}}}
		if w.chance(3) {
			return fmt.Sprint("bulk load ", entries), func(ctx context.Context, s *twin) answers {
				stream, err := s.c.kv.BulkLoad(ctx)
				if err != nil {
					return answers{err: err}
				}
				_ = stream.Send(entries)
				return one(stream.CloseAndRecv())
			}
		}
		return fmt.Sprint("pipeline ", m), func(ctx context.Context, s *twin) answers {
			stream, err := s.c.kv.Pipeline(ctx)
			if err == nil {
				_ = stream.Send(m) // if the stream has ended, Recv has the reason
				_ = stream.CloseSend()
			}
			return unwrapped(received(func() (*pb.PipelineResponse, error) { return stream.Recv() }, err, 2))
		}
	}
	if n == 17 {
		key := w.anyKey()
		return fmt.Sprintf("get stream %q", key), func(ctx context.Context, s *twin) answers {
			stream, err := s.c.kv.GetStream(ctx, &pb.GetStreamRequest{Key: key})
			return received(func() (*pb.GetStreamResponse, error) { return stream.Recv() }, err, 100)
		}
	}
	return w.adminRequest()
}

// sameLease: a lease that has keys which the user may not read is as if it did not exist, and whether it has any differs here. So what
// is compared is only that the keys are those that the user may read.
func (w *twins) sameLease(a answers) answers {
	for _, m := range a.list {
		for _, key := range m.(*pb.GetLeaseResponse).Keys {
			if !w.mayRead(key) {
				w.t.Errorf("a user with %v gets key %q of a lease", rolesText(w.role), key)
			}
		}
	}
	if a.err != nil || len(a.list) > 0 {
		return answers{}
	}
	return a
}

// unwrapped takes the error out of the answers of a pipeline.
func unwrapped(a answers) answers {
	for _, m := range a.list {
		if e := m.(*pb.PipelineResponse).GetError(); e != nil {
			a.err = status.ErrorProto(e)
		}
	}
	return a
}

func (w *twins) unaryRequest() (string, func(context.Context, *twin) answers) {
	m := w.pipelineMessage()
	return fmt.Sprint("unary ", m), func(ctx context.Context, s *twin) answers {
		switch r := m.Request.(type) {
		case *pb.PipelineRequest_Get:
			if len(s.epochs) > 1 {
				r.Get.SnapshotEpoch = s.epochs[len(s.epochs)-1]
			}
			return one(s.c.kv.Get(ctx, r.Get))
		case *pb.PipelineRequest_Put:
			return one(s.c.kv.Put(ctx, r.Put))
		case *pb.PipelineRequest_Delete:
			return one(s.c.kv.Delete(ctx, r.Delete))
		case *pb.PipelineRequest_BatchGet:
			return one(s.c.kv.BatchGet(ctx, r.BatchGet))
		case *pb.PipelineRequest_BatchWrite:
			return one(s.c.kv.BatchWrite(ctx, r.BatchWrite))
		case *pb.PipelineRequest_DeleteRange:
			return one(s.c.kv.DeleteRange(ctx, r.DeleteRange))
		case *pb.PipelineRequest_Invoke:
			return one(s.c.kv.Invoke(ctx, r.Invoke))
		}
		return one(s.c.kv.InvokeAll(ctx, m.GetInvokeAll()))
	}
}

// transaction is some operations of an interactive transaction, with its end.
func (w *twins) transaction() (string, func(context.Context, *twin) answers) {
	list := []*pb.TransactRequest{{Request: &pb.TransactRequest_Begin{Begin: &pb.BeginRequest{Isolation: pb.Isolation(1 + w.rnd.IntN(2))}}}}
	for _, o := range append(w.operations(), w.operations()...) {
		r := &pb.TransactRequest{}
		switch is := o.Operation.(type) {
		case *pb.Operation_Get:
			r.Request = &pb.TransactRequest_Get{Get: is.Get}
		case *pb.Operation_Scan:
			r.Request = &pb.TransactRequest_Scan{Scan: is.Scan}
		case *pb.Operation_Write:
			r.Request = &pb.TransactRequest_Write{Write: &pb.WriteRequest{Mutations: []*pb.Mutation{is.Write}}}
		case *pb.Operation_DeleteRange:
			r.Request = &pb.TransactRequest_DeleteRange{DeleteRange: is.DeleteRange}
		case *pb.Operation_Invoke:
			r.Request = &pb.TransactRequest_Invoke{Invoke: is.Invoke}
		}
		list = append(list, r)
	}
	list = append(list, &pb.TransactRequest{Request: &pb.TransactRequest_Commit{Commit: &pb.CommitRequest{}}})
	return fmt.Sprint("transact ", list), func(ctx context.Context, s *twin) (a answers) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		stream, err := s.c.txn.Transact(ctx)
		for _, m := range list {
			if err == nil {
				err = stream.Send(m)
			}
			var out *pb.TransactResponse
			if err == nil {
				out, err = stream.Recv()
			}
			if err != nil {
				return answers{a.list, err}
			}
			if b := out.GetBegin(); b != nil {
				b.Id = 0
			}
			if e := out.GetError(); e != nil {
				return answers{a.list, status.ErrorProto(e)}
			}
			a.list = append(a.list, out)
		}
		return a
	}
}

// watchRequest is a watch of which the answers are compared while another user writes.
func (w *twins) watchRequest() (string, func(context.Context, *twin) answers) {
	create := &pb.CreateWatch{Ranges: []*pb.KeyRange{w.anyRange()}, Values: pb.WatchValues_WATCH_VALUES_NEW_AND_PREVIOUS}
	if w.chance(2) {
		create.Start = &pb.CreateWatch_Snapshot{Snapshot: &pb.WatchSnapshot{}}
	}
	write := w.writesOfOthers()
	return fmt.Sprint("watch ", create), func(ctx context.Context, s *twin) (a answers) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		stream, err := s.c.feed.Watch(ctx)
		if err == nil {
			err = stream.Send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: create}})
		}
		for epoch := uint64(0); err == nil; {
			var out *pb.WatchResponse
			if out, err = stream.Recv(); err != nil {
				break
			}
			switch {
			case out.GetEnded() != nil:
				return answers{a.list, status.ErrorProto(out.GetEnded().Error)}
			case out.GetCreated() != nil && create.Start == nil, out.GetSnapshot().GetEnd():
				a.list = append(a.list, out)
				epoch = write(s)
				err = stream.Send(&pb.WatchRequest{Request: &pb.WatchRequest_Progress{Progress: &pb.RequestProgress{}}})
			case out.GetProgress() != nil:
				if epoch != 0 && out.GetProgress().Epoch >= epoch {
					return a
				}
				err = stream.Send(&pb.WatchRequest{Request: &pb.WatchRequest_Progress{Progress: &pb.RequestProgress{}}})
			default:
				a.list = append(a.list, out)
			}
		}
		return answers{a.list, err}
	}
}

// writesOfOthers writes a key as another user: equally if the user may read it.
func (w *twins) writesOfOthers() func(s *twin) uint64 {
	i := w.rnd.IntN(canaryKeys)
	key, readable := w.key(i), w.mayRead(w.key(i))
	return func(s *twin) uint64 {
		list := []*pb.Mutation{{Kind: pb.Mutation_KIND_PUT, Key: key, Value: []byte("event")}}
		if !readable {
			list[0].Value = []byte("CANARY event")
			if s == w.sides[1] {
				list[0] = &pb.Mutation{Kind: pb.Mutation_KIND_DELETE, Key: key}
			}
		}
		out, err := s.root.kv.BatchWrite(as(testContext(w.t), "root"), &pb.BatchWriteRequest{Mutations: list})
		if err != nil {
			w.t.Fatal(err)
		}
		return out.Epoch
	}
}

// adminRequest is refused, because the roles have no administrative actions.
func (w *twins) adminRequest() (string, func(context.Context, *twin) answers) {
	n := w.rnd.IntN(5)
	return fmt.Sprint("administration ", n), func(ctx context.Context, s *twin) answers {
		switch n {
		case 0:
			return one(s.c.admin.Status(ctx, &pb.StatusRequest{}))
		case 1:
			return one(s.c.admin.Space(ctx, &pb.SpaceRequest{ByPrefix: true, Depth: 1}))
		case 2:
			return one(s.c.admin.ListWatches(ctx, &pb.ListWatchesRequest{}))
		case 3:
			return one(s.c.lease.ListLeases(ctx, &pb.ListLeasesRequest{}))
		}
		stream, err := s.c.admin.Verify(ctx, &pb.VerifyRequest{})
		return received(func() (*pb.VerifyResponse, error) { return stream.Recv() }, err, 100)
	}
}

// openPipelines opens a pipeline to each server, which stays open while the role changes.
func (w *twins) openPipelines() (p [2]pb.KVService_PipelineClient) {
	for i, s := range w.sides {
		ctx, cancel := context.WithCancel(as(testContext(w.t), "user"))
		w.t.Cleanup(cancel)
		stream, err := s.c.kv.Pipeline(ctx)
		if err != nil {
			w.t.Fatal(err)
		}
		p[i] = stream
	}
	return p
}

func (w *twins) usePipelines(p [2]pb.KVService_PipelineClient) {
	for range 15 {
		m := w.pipelineMessage()
		w.compare(fmt.Sprint("open pipeline ", m), func(s *twin) answers {
			stream := p[0]
			if s == w.sides[1] {
				stream = p[1]
			}
			if err := stream.Send(m); err != nil {
				return answers{err: err}
			}
			return unwrapped(received(func() (*pb.PipelineResponse, error) { return stream.Recv() }, nil, 1))
		})
	}
}
