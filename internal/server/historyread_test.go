package server

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// retainingQuietly keeps the past for so long that a sample, which takes an epoch, is taken every five minutes.
func retainingQuietly(c *config.Config) { c.Retention = 365 * 24 * time.Hour }

func (h *harness) mustPut(t *testing.T, key, value string) uint64 {
	t.Helper()
	done, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte(key), Value: []byte(value)})
	if err != nil {
		t.Fatal(err)
	}
	return done.GetEpoch()
}

func (h *harness) mustDelete(t *testing.T, key string) uint64 {
	t.Helper()
	done, err := h.kv.Delete(testContext(t), &pb.DeleteRequest{Key: []byte(key)})
	if err != nil {
		t.Fatal(err)
	}
	return done.GetEpoch()
}

// historyText is the answers to a request, and to those with its tokens, in short.
func historyText(t *testing.T, feed pb.FeedServiceClient, req *pb.HistoryRequest) (text string, parts int, err error) {
	t.Helper()
	var lines []string
	for {
		out, err := feed.History(testContext(t), req)
		if err != nil {
			return strings.Join(lines, " "), parts, err
		}
		parts++
		for _, v := range out.GetVersions() {
			line := fmt.Sprintf("%s@%d=%s", v.GetKey(), v.GetEpoch(), v.GetValue())
			if v.GetKind() == pb.EventKind_EVENT_KIND_DELETE {
				line = fmt.Sprintf("%s@%d-", v.GetKey(), v.GetEpoch())
			}
			if v.GetOrigin() != pb.CommitOrigin_COMMIT_ORIGIN_CLIENT || v.GetTimeUs() == 0 {
				line += fmt.Sprintf("(origin %v, time %d)", v.GetOrigin(), v.GetTimeUs())
			}
			lines = append(lines, line)
		}
		if req.ResumeToken = out.GetResumeToken(); len(req.ResumeToken) == 0 {
			return strings.Join(lines, " "), parts, nil
		}
	}
}

// TestHistoryShowsEveryVersion of a key or a range, newest first, deletions included, from any state to any other, in parts of
// any size.
func TestHistoryShowsEveryVersion(t *testing.T) {
	h := mustStart(t, retainingQuietly)
	feed := pb.NewFeedServiceClient(h.conn)
	a1 := h.mustPut(t, "a", "1")
	b := h.mustPut(t, "b", "x")
	a2 := h.mustPut(t, "a", "2")
	at := clockAfter(t, h)
	gone := h.mustDelete(t, "a")
	a3 := h.mustPut(t, "a", "3")
	clockAfter(t, h)
	all := fmt.Sprintf("a@%d=3 a@%d- a@%d=2 a@%d=1 b@%d=x", a3, gone, a2, a1, b)
	for name, c := range map[string]struct {
		req   *pb.HistoryRequest
		want  string
		parts int
	}{
		"all":          {&pb.HistoryRequest{}, all, 1},
		"by ones":      {&pb.HistoryRequest{Limit: 1}, all, 5},
		"by twos":      {&pb.HistoryRequest{Limit: 2, Range: &pb.KeyRange{Start: []byte("a"), End: []byte("z")}}, all, 3},
		"key":          {&pb.HistoryRequest{Key: []byte("b")}, fmt.Sprintf("b@%d=x", b), 1},
		"from":         {&pb.HistoryRequest{FromEpoch: a2, Limit: 1}, fmt.Sprintf("a@%d=3 a@%d-", a3, gone), 2},
		"from a time":  {&pb.HistoryRequest{FromTimeUs: at}, fmt.Sprintf("a@%d=3 a@%d-", a3, gone), 1},
		"to":           {&pb.HistoryRequest{ToEpoch: gone, Limit: 3}, fmt.Sprintf("a@%d- a@%d=2 a@%d=1 b@%d=x", gone, a2, a1, b), 2},
		"to a time":    {&pb.HistoryRequest{ToTimeUs: at, Limit: 2}, fmt.Sprintf("a@%d=2 a@%d=1 b@%d=x", a2, a1, b), 2},
		"keys only":    {&pb.HistoryRequest{Key: []byte("b"), KeysOnly: true}, fmt.Sprintf("b@%d=", b), 1},
		"nothing":      {&pb.HistoryRequest{FromEpoch: a3}, "", 1},
		"the same":     {&pb.HistoryRequest{FromEpoch: a2, ToEpoch: a2}, "", 1},
		"no such keys": {&pb.HistoryRequest{Range: &pb.KeyRange{Prefix: []byte("c")}}, "", 1},
	} {
		if got, parts, err := historyText(t, feed, c.req); err != nil || got != c.want || parts != c.parts {
			t.Errorf("%s: %s in %d parts, %v; want %s in %d", name, got, parts, err, c.want, c.parts)
		}
	}
}

// TestHistoryIsRefused with the reason that says why.
func TestHistoryIsRefused(t *testing.T) {
	h := mustStart(t)
	feed, ctx := pb.NewFeedServiceClient(h.conn), testContext(t)
	first := h.mustPut(t, "k", "0")
	for range 5 {
		h.mustPut(t, "k", "v")
		h.mustPut(t, "l", "v")
	}
	eventually(t, "the first epochs are not kept", func() bool { return h.store.LowWatermark() > 5 })
	token := func() []byte {
		out, err := feed.History(ctx, &pb.HistoryRequest{Limit: 1})
		if err != nil || len(out.GetResumeToken()) == 0 || out.GetOldestEpoch() == 0 {
			t.Fatal(out, err)
		}
		return out.GetResumeToken()
	}()
	for name, c := range map[string]struct {
		req      *pb.HistoryRequest
		code     codes.Code
		reason   pb.ErrorReason
		metadata []string
	}{
		"from is gone":     {&pb.HistoryRequest{FromEpoch: first}, codes.OutOfRange, pb.ErrorReason_ERROR_REASON_SNAPSHOT_GONE, []string{"epoch", "oldest"}},
		"to is gone":       {&pb.HistoryRequest{ToEpoch: first}, codes.OutOfRange, pb.ErrorReason_ERROR_REASON_SNAPSHOT_GONE, []string{"epoch", "oldest"}},
		"to is not there":  {&pb.HistoryRequest{ToEpoch: 1 << 40}, codes.OutOfRange, pb.ErrorReason_ERROR_REASON_SNAPSHOT_IN_FUTURE, []string{"epoch", "visible"}},
		"backwards":        {&pb.HistoryRequest{FromEpoch: 9, ToEpoch: 8}, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_RANGE, nil},
		"epoch and time":   {&pb.HistoryRequest{FromEpoch: 9, FromTimeUs: 8}, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST, nil},
		"key and range":    {&pb.HistoryRequest{Key: []byte("k"), Range: &pb.KeyRange{}}, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST, nil},
		"another's token":  {&pb.HistoryRequest{Key: []byte("k"), ResumeToken: token}, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_RESUME_TOKEN, nil},
		"a damaged token":  {&pb.HistoryRequest{ResumeToken: token[:len(token)-1]}, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_RESUME_TOKEN, nil},
		"a token of scans": {&pb.HistoryRequest{ResumeToken: appendToken(nil, token2(h, "k"))}, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_RESUME_TOKEN, nil},
	} {
		_, err := feed.History(ctx, c.req)
		t.Log(name)
		failureOf(t, err).want(t, c.code, c.reason, c.metadata...)
	}
	newest := h.mustPut(t, "held", "v")
	if _, err := h.admin.TakeHold(ctx, &pb.TakeHoldRequest{Epoch: newest, Ttl: durationpb.New(time.Hour)}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		h.mustPut(t, fmt.Sprint("m", h.store.Visible()), "v")
	}
	diff, err := feed.Diff(ctx, &pb.DiffRequest{FromEpoch: newest, Limit: 1})
	if err != nil || len(diff.GetResumeToken()) == 0 {
		t.Fatal(diff, err)
	}
	_, err = feed.History(ctx, &pb.HistoryRequest{FromEpoch: newest, ResumeToken: diff.GetResumeToken()})
	failureOf(t, err).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_RESUME_TOKEN)
	past, err := feed.History(ctx, &pb.HistoryRequest{FromEpoch: newest, Limit: 1})
	if err != nil || len(past.GetResumeToken()) == 0 {
		t.Fatal(past, err)
	}
	_, err = feed.Diff(ctx, &pb.DiffRequest{FromEpoch: newest, ResumeToken: past.GetResumeToken()})
	failureOf(t, err).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_RESUME_TOKEN)
	_, err = feed.Diff(ctx, &pb.DiffRequest{})
	failureOf(t, err).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST)
	_, err = feed.Diff(ctx, &pb.DiffRequest{FromEpoch: first})
	failureOf(t, err).want(t, codes.OutOfRange, pb.ErrorReason_ERROR_REASON_SNAPSHOT_GONE, "epoch", "oldest")
}

// token2 is a token of a scan of everything that has come to a key.
func token2(h *harness, key string) token {
	return token{epoch: h.store.Visible(), last: []byte(key), bounds: hashPast(bounds{}, historyToken, 0, 0, 0, 0), store: h.storeID}
}

// TestDiffShowsWhatDiffers between two states, with both values, in parts of any size; the two states stay readable between the
// parts.
func TestDiffShowsWhatDiffers(t *testing.T) {
	h := mustStart(t)
	feed, ctx := pb.NewFeedServiceClient(h.conn), testContext(t)
	h.mustPut(t, "same", "1")
	h.mustPut(t, "deleted", "1")
	from := h.mustPut(t, "changed", "1")
	held, err := h.admin.TakeHold(ctx, &pb.TakeHoldRequest{Epoch: from, Ttl: durationpb.New(time.Hour)})
	if err != nil {
		t.Fatal(err)
	}
	h.mustPut(t, "added", "1")
	h.mustPut(t, "brief", "1")
	h.mustDelete(t, "brief")
	h.mustDelete(t, "deleted")
	to := h.mustPut(t, "changed", "2")
	req := &pb.DiffRequest{FromEpoch: from, ToEpoch: to, Limit: 1}
	var got []string
	for parts := 0; ; parts++ {
		out, err := feed.Diff(ctx, req)
		if err != nil {
			t.Fatal(err)
		}
		if out.GetFromEpoch() != from || out.GetToEpoch() != to {
			t.Fatalf("compares %d and %d; want %d and %d", out.GetFromEpoch(), out.GetToEpoch(), from, to)
		}
		for _, c := range out.GetChanges() {
			got = append(got, fmt.Sprintf("%s %t %q %t %q", c.GetKey(), c.GetOld() != nil, c.GetOld().GetValue(), c.GetNew() != nil, c.GetNew().GetValue()))
		}
		if req.ResumeToken = out.GetResumeToken(); len(req.ResumeToken) == 0 {
			break
		}
		if parts == 0 { // from here on only the leases of the token keep the two states
			if _, err := h.admin.EndHold(ctx, &pb.EndHoldRequest{Id: held.GetHold().GetId()}); err != nil {
				t.Fatal(err)
			}
			h.mustPut(t, "added", "3")
			eventually(t, "the states are not kept by a hold", func() bool { h.mustPut(t, "same", "x"); return h.store.LowWatermark() > keys.Epoch(to) })
		}
	}
	want := []string{`added false "" true "1"`, `changed true "1" true "2"`, `deleted true "1" false ""`}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Fatalf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// TestHoldsKeepThePast until their deadlines or ends, across restarts; the log says when one begins and ends.
func TestHoldsKeepThePast(t *testing.T) {
	h := mustStart(t)
	ctx := testContext(t)
	old := h.mustPut(t, "k", "old")
	take := func(req *pb.TakeHoldRequest) *pb.Hold {
		t.Helper()
		out, err := h.admin.TakeHold(ctx, req)
		if err != nil {
			t.Fatal(err)
		}
		return out.GetHold()
	}
	kept := take(&pb.TakeHoldRequest{Owner: "audit", Epoch: old, Ttl: durationpb.New(time.Hour)})
	brief := take(&pb.TakeHoldRequest{Owner: "brief", Ttl: durationpb.New(time.Second)})
	h.mustPut(t, "k", "new")
	renewed := take(&pb.TakeHoldRequest{Id: kept.GetId(), Ttl: durationpb.New(2 * time.Hour)})
	if renewed.GetDeadlineMs() <= kept.GetDeadlineMs() || renewed.GetEpoch() != old || renewed.GetOwner() != "audit" {
		t.Fatalf("%v became %v", kept, renewed)
	}
	for name, req := range map[string]*pb.TakeHoldRequest{
		"no time": {}, "too long": {Ttl: durationpb.New(mvcc.HoldTimeMax + 1)}, "another owner": {Id: kept.GetId(), Owner: "x", Ttl: durationpb.New(time.Hour)},
		"a long owner":         {Owner: strings.Repeat("x", mvcc.HoldOwnerMax+1), Ttl: durationpb.New(time.Hour)},
		"an epoch and time":    {Epoch: 1, TimeUs: 1, Ttl: durationpb.New(time.Hour)},
		"one as the archive's": {Owner: mvcc.ArchiveOwner + "bulk load after epoch 0, 2026-11-22T10:00:00.000000Z", Ttl: durationpb.New(time.Hour)},
	} {
		_, err := h.admin.TakeHold(ctx, req)
		t.Log(name)
		failureOf(t, err).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST)
	}
	eventually(t, "the brief hold ends", func() bool {
		list, err := h.admin.ListHolds(ctx, &pb.ListHoldsRequest{})
		return err == nil && len(list.GetHolds()) == 1 && list.GetHolds()[0].GetId() == kept.GetId()
	})
	_, err := h.admin.EndHold(ctx, &pb.EndHoldRequest{Id: brief.GetId()})
	failureOf(t, err).want(t, codes.NotFound, pb.ErrorReason_ERROR_REASON_HOLD_NOT_FOUND)
	got, err := h.kv.Get(ctx, &pb.GetRequest{Key: []byte("k"), SnapshotEpoch: old})
	if err != nil || string(got.GetValue()) != "old" {
		t.Fatal(got, err)
	}
	if _, err := h.admin.EndHold(ctx, &pb.EndHoldRequest{Id: kept.GetId()}); err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"a hold was taken", "a hold has ended at its deadline", "owner=brief", "a client ends a hold", "owner=audit"} {
		eventually(t, "the log has "+line, func() bool { return strings.Contains(h.log.String(), line) })
	}
}

// TestTooManyHoldsAreRefused.
func TestTooManyHoldsAreRefused(t *testing.T) {
	h := mustStart(t)
	h.mustPut(t, "k", "v")
	x, err := h.store.Session()
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	for range mvcc.HoldsMax {
		if _, err := x.TakeHold(context.Background(), "", 0, time.Hour); err != nil {
			t.Fatal(err)
		}
	}
	_, err = h.admin.TakeHold(testContext(t), &pb.TakeHoldRequest{Ttl: durationpb.New(time.Hour)})
	failureOf(t, err).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_TOO_MANY_HOLDS, "limit")
}
