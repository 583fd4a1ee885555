package server

import (
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/invariants"
)

// compared counts how often requests, or watches, are compared with rights. It is called before the servers of the test are started.
func compared(t *testing.T, row *rpcRow) *atomic.Int64 {
	count, compare := new(atomic.Int64), row.footprint
	row.footprint = func(f *footprint, request any) {
		count.Add(1)
		compare(f, request)
	}
	t.Cleanup(func() { row.footprint = compare })
	return count
}

// nextTable is a table with the same users and tokens, but for what change does, as users.Manager makes it.
func nextTable(before *auth.Table, change func(*auth.Table)) *auth.Table {
	t := *before
	t.Users = maps.Clone(before.Users)
	for i := range t.Tokens {
		t.Tokens[i] = maps.Clone(before.Tokens[i])
	}
	change(&t)
	return &t
}

func nothing(*auth.Table) {}

// watchesOfAlice is a stream of alice with watches of the prefixes; their ids are the places in the list, from 1.
type watchesOfAlice struct {
	t      *testing.T
	stream grpc.BidiStreamingClient[pb.WatchRequest, pb.WatchResponse]
	ids    uint64
}

func watchAsAlice(t *testing.T, h *harness, prefixes ...string) *watchesOfAlice {
	t.Helper()
	stream, err := pb.NewFeedServiceClient(h.dial(t)).Watch(as(testContext(t), "alice"))
	must(t, err)
	w := &watchesOfAlice{t: t, stream: stream}
	for _, prefix := range prefixes {
		if out := w.create(prefix); out.GetCreated() == nil {
			t.Fatal(out)
		}
	}
	return w
}

func (w *watchesOfAlice) create(prefix string) *pb.WatchResponse {
	w.t.Helper()
	w.ids++
	must(w.t, w.stream.Send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: &pb.CreateWatch{WatchId: w.ids, Ranges: []*pb.KeyRange{prefixRange(prefix)}}}}))
	out, err := w.stream.Recv()
	must(w.t, err)
	return out
}

// ended receives the ends of so many watches, and reports their ids.
func (w *watchesOfAlice) ended(count int, want codes.Code) (ids []uint64) {
	w.t.Helper()
	for range count {
		out, err := w.stream.Recv()
		must(w.t, err)
		if out.GetEnded() == nil || status.FromProto(out.GetEnded().GetError()).Code() != want {
			w.t.Fatalf("got %v, want the end of a watch with %v", out, want)
		}
		ids = append(ids, out.WatchId)
	}
	slices.Sort(ids)
	return ids
}

// TestWatchesOfUsersThatHaveNotChangedAreNotComparedAgain: every user may make and remove tokens of its own, without end, beside very many
// watches of others.
func TestWatchesOfUsersThatHaveNotChangedAreNotComparedAgain(t *testing.T) {
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		count := compared(t, watchRow)
		h := mustStart(t, with)
		table := h.setUsers(map[string][]auth.Grant{"alice": {grant("r", "a")}, "eve": nil})
		w := watchAsAlice(t, h, slices.Repeat([]string{"a"}, 10)...)
		for range 20 {
			table = nextTable(table, func(t *auth.Table) { addToken(t, "eve", time.Now().Add(time.Hour)) })
			h.gate.publish(table)
		}
		before := count.Load()
		for range 2 { // between the two, the stream has looked at the users
			if out := w.create("a"); out.GetCreated() == nil {
				t.Fatal(out)
			}
		}
		once := int64(1)
		if invariants.Enabled { // a new watch's claims are made with the same function
			once = 2
		}
		if got := count.Load() - before; got != 2*once || before != 10*once {
			t.Errorf("10 watches were compared %d times, and %d times with 2 more; want 10 and 2", before, got)
		}
		h.gate.publish(nextTable(table, func(t *auth.Table) {
			t.Users["alice"] = &auth.User{Name: "alice", Rights: auth.Compile([]auth.Grant{grant("r", "b")})}
		}))
		w.ended(12, codes.PermissionDenied)
	})
}

// TestWatchesEndWithWhateverTakesTheirRightAway, and others of the stream stay: however changes follow each other, and although most of them
// change nothing about the user.
func TestWatchesEndWithWhateverTakesTheirRightAway(t *testing.T) {
	alice := func(disabled bool, prefixes ...string) func(*auth.Table) {
		var grants []auth.Grant
		for _, p := range prefixes {
			grants = append(grants, grant("r", p))
		}
		user := &auth.User{Name: "alice", Disabled: disabled, Rights: auth.Compile(grants)}
		return func(t *auth.Table) { t.Users["alice"] = user }
	}
	withoutToken := func(t *auth.Table) {
		for i := range t.Tokens {
			maps.DeleteFunc(t.Tokens[i], func(_ auth.TokenHash, k *auth.Token) bool { return k.User == "alice" })
		}
	}
	without := func(t *auth.Table) { delete(t.Users, "alice"); withoutToken(t) }
	tokenAgain := func(t *auth.Table) { addToken(t, "alice", time.Time{}) }
	expired := func(t *auth.Table) { addToken(t, "alice", time.Now().Add(-time.Second)) }
	all := []uint64{1, 2, 3}
	onBothTransports(t, func(t *testing.T, h *harness) {
		for name, row := range map[string]struct {
			changes []func(*auth.Table)
			ends    []uint64
			code    codes.Code
		}{
			"a role":                       {[]func(*auth.Table){alice(false, "a", "c")}, []uint64{2}, codes.PermissionDenied},
			"a role, then nothing":         {[]func(*auth.Table){alice(false, "a", "c"), nothing, nothing}, []uint64{2}, codes.PermissionDenied},
			"nothing, then a role":         {[]func(*auth.Table){nothing, nothing, alice(false, "a", "c")}, []uint64{2}, codes.PermissionDenied},
			"all roles":                    {[]func(*auth.Table){nothing, alice(false)}, all, codes.PermissionDenied},
			"disabled":                     {[]func(*auth.Table){alice(true, "a", "b", "c"), nothing}, all, codes.Unauthenticated},
			"deleted":                      {[]func(*auth.Table){without, nothing}, all, codes.Unauthenticated},
			"deleted and made again":       {[]func(*auth.Table){nothing, without, alice(false, "a", "b", "c")}, all, codes.Unauthenticated},
			"logged out":                   {[]func(*auth.Table){withoutToken}, all, codes.Unauthenticated},
			"logged out, then nothing":     {[]func(*auth.Table){withoutToken, nothing, nothing}, all, codes.Unauthenticated},
			"a token that has expired now": {[]func(*auth.Table){expired, nothing}, all, codes.Unauthenticated},
		} {
			table := h.setUsers(only(grant("r", "a"), grant("r", "b"), grant("r", "c")))
			w := watchAsAlice(t, h, "a", "b", "c")
			for _, change := range row.changes {
				table = nextTable(table, change)
				h.gate.publish(table)
			}
			if got := w.ended(len(row.ends), row.code); !slices.Equal(got, row.ends) {
				t.Errorf("%s: %v have ended, want %v", name, got, row.ends)
			}
			h.gate.publish(nextTable(table, func(t *auth.Table) { alice(false, "a", "b", "c")(t); tokenAgain(t) }))
			if out := w.create("a"); out.GetCreated() == nil { // and nothing else has ended
				t.Errorf("%s: %v", name, out)
			}
		}
	})
}

// TestWatchesThatWereNotCheckedAreComparedWithTheSameUser: the users are checked, then not, then checked again.
func TestWatchesThatWereNotCheckedAreComparedWithTheSameUser(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		for name, prefixes := range map[string]string{"in the beginning": "a b", "between": "a"} {
			table := h.setUsers(only(grant("r", "a"), grant("r", "b")))
			w := watchAsAlice(t, h, strings.Fields(prefixes)...)
			h.gate.publish(nil)
			for range 2 { // the stream has looked at the users between them
				if out := w.create("x"); out.GetCreated() == nil {
					t.Fatal(name, out)
				}
			}
			h.gate.publish(nextTable(table, nothing))
			w.ended(2, codes.PermissionDenied)
			if out := w.create("a"); out.GetCreated() == nil {
				t.Error(name, out)
			}
		}
	})
}

// TestAWatchCheckedWithNewUsersDoesNotHideThoseBefore: it is made after the users have changed, and before the stream has looked at them.
func TestAWatchCheckedWithNewUsersDoesNotHideThoseBefore(t *testing.T) {
	h := mustStart(t)
	table := h.setUsers(only(grant("r", "a")))
	w := &watchStream{server: h.Server, watches: map[uint64]*streamWatch{}, rights: watchRights{
		access: access{gate: &h.gate, conn: new(connection), header: "Bearer alice"},
	}}
	permit := func(prefix string) error {
		sw := &streamWatch{id: uint64(len(w.watches)) + 1}
		req := &pb.CreateWatch{WatchId: sw.id, Ranges: []*pb.KeyRange{prefixRange(prefix)}}
		_, err := w.toWatchOptions(req, &sw.options)
		must(t, err)
		if err = w.permit(t.Context(), sw, req); err == nil {
			w.watches[sw.id] = sw
		}
		return err
	}
	must(t, permit("a"))
	must(t, w.endForbidden(t.Context()))
	before := table.Users["alice"]
	if w.rights.user != before {
		t.Fatal("the user is not known")
	}
	h.gate.publish(nextTable(table, func(t *auth.Table) {
		t.Users["alice"] = &auth.User{Name: "alice", Rights: auth.Compile([]auth.Grant{grant("r", "b")})}
	}))
	if err := permit("a"); !isDenial(err) {
		t.Errorf("a watch without a right: %v", err)
	}
	if w.rights.user != before {
		t.Error("a watch that was refused has changed what the others were checked with")
	}
	must(t, permit("b"))
	if w.rights.user != nil {
		t.Errorf("the watches were all checked with %v", w.rights.user)
	}
}

// TestAChangeOfUsersThatWasSeenBeforeItWasToldWakesAStreamOnce: the table is published a moment before its streams are told.
func TestAChangeOfUsersThatWasSeenBeforeItWasToldWakesAStreamOnce(t *testing.T) {
	h := mustStart(t)
	w := &watchStream{server: h.Server, watches: map[uint64]*streamWatch{}, rights: watchRights{
		access: access{gate: &h.gate, conn: new(connection), header: "Bearer alice"},
	}}
	told := func() bool {
		user, token := w.rights.access.follow()
		select {
		case <-user:
		case <-token:
		default:
			return false
		}
		return true
	}
	for name, change := range map[string]func(*auth.Table){
		"user":      func(t *auth.Table) { t.Users["alice"] = &auth.User{Name: "alice", Rights: auth.Compile(nil)} },
		"token":     func(t *auth.Table) { addToken(t, "alice", time.Now().Add(time.Hour)) },
		"enabled":   nothing,
		"of others": func(t *auth.Table) { addToken(t, "eve", time.Time{}) },
	} {
		table := h.setUsers(only(grant("r", "a")))
		if name == "enabled" {
			h.gate.publish(nil)
		}
		must(t, w.endForbidden(t.Context()))
		if told() {
			t.Errorf("%s: the stream is woken before the change", name)
		}
		if h.gate.publish(nextTable(table, change)); told() == (name == "of others") {
			t.Errorf("%s: woken: %v", name, told())
		}
		must(t, w.endForbidden(t.Context()))
		if told() {
			t.Errorf("%s: the stream is woken again and again", name)
		}
	}
}

// TestAWatchThatIsNextHasNothingOfWhatCameAfterItsRight: its stream has been waiting for the client, with a part of a snapshot of another watch, and
// then takes what the feed has for it.
func TestAWatchThatIsNextHasNothingOfWhatCameAfterItsRight(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		h.putLarge(t, 4, watchResponseBytes/2)
		table := h.setUsers(only(grant("r", "large/"), grant("r", "b")))
		stream, err := pb.NewFeedServiceClient(h.dialDeaf(t)).Watch(as(testContext(t), "alice"))
		must(t, err)
		w := &watchesOfAlice{t: t, stream: stream}
		if out := w.create("b"); out.GetCreated() == nil {
			t.Fatal(out)
		}
		must(t, stream.Send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: &pb.CreateWatch{
			WatchId: 2, Ranges: []*pb.KeyRange{prefixRange("large/")}, Start: &pb.CreateWatch_Snapshot{Snapshot: &pb.WatchSnapshot{}},
		}}}))
		eventually(t, "a part of the snapshot waits for the client", func() bool {
			h.snapshots.mu.Lock()
			open := slices.Collect(maps.Values(h.snapshots.open))
			h.snapshots.mu.Unlock()
			return slices.ContainsFunc(open, func(o *openSnapshot) bool {
				o.mu.Lock()
				defer o.mu.Unlock()
				return o.waiting
			})
		})
		h.gate.publish(nextTable(table, func(t *auth.Table) {
			t.Users["alice"] = &auth.User{Name: "alice", Rights: auth.Compile(nil)}
		}))
		_, err = h.kv.Put(as(testContext(t), "root"), &pb.PutRequest{Key: []byte("b"), Value: []byte("secret")})
		must(t, err)
		eventually(t, "the feed has it", func() bool { return h.feed.feed.Stable() >= h.store.Visible() })
		for ended := 0; ended < 2; {
			out, err := stream.Recv()
			must(t, err)
			if out.GetChanges() != nil {
				t.Fatalf("a commit after the right was taken away: %v", out)
			}
			if out.GetEnded() != nil {
				ended++
			}
		}
	})
}
