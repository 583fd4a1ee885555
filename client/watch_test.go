package client_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
	"github.com/epochkv/epochkv/client/clienttest"
)

// feedScript is a FeedService that answers the n-th watch with the n-th script, and notes where the watch wanted to begin.
type feedScript struct {
	kvpb.UnimplementedFeedServiceServer
	scripts []func(send func(*kvpb.WatchResponse)) error

	mu     sync.Mutex
	starts []string // guarded by mu
}

func (f *feedScript) Watch(stream grpc.BidiStreamingServer[kvpb.WatchRequest, kvpb.WatchResponse]) error {
	r, err := stream.Recv()
	if err != nil {
		return err
	}
	script := f.next(r.GetCreate())
	if script == nil {
		return status.Error(codes.InvalidArgument, "one watch too many")
	}
	return script(func(r *kvpb.WatchResponse) { _ = stream.Send(r) })
}

func (f *feedScript) next(r *kvpb.CreateWatch) func(send func(*kvpb.WatchResponse)) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.starts) == len(f.scripts) {
		return nil
	}
	switch s := r.GetStart().(type) {
	case *kvpb.CreateWatch_ResumeToken:
		f.starts = append(f.starts, "token "+string(s.ResumeToken))
	case *kvpb.CreateWatch_Snapshot:
		f.starts = append(f.starts, "snapshot")
	default:
		f.starts = append(f.starts, fmt.Sprintf("%T", s))
	}
	return f.scripts[len(f.starts)-1]
}

func snapshotPart(token string, end bool, keys ...string) *kvpb.WatchResponse {
	part := &kvpb.WatchSnapshotPart{Epoch: 7, End: end}
	for _, k := range keys {
		part.Entries = append(part.Entries, &kvpb.Entry{Key: []byte(k), Epoch: 7})
	}
	return &kvpb.WatchResponse{Body: &kvpb.WatchResponse_Snapshot{Snapshot: part}, ResumeToken: []byte(token)}
}

func endedWith(reason kvpb.ErrorReason) *kvpb.WatchResponse {
	e := clienttest.NewError(codes.OutOfRange, reason, "the test says so")
	return &kvpb.WatchResponse{Body: &kvpb.WatchResponse_Ended{Ended: &kvpb.WatchEnded{Error: status.Convert(e).Proto()}}}
}

// TestWatchBeginsALostSnapshotAgain: a server that restarts within a snapshot may not be able to continue it. The watch takes a
// new one, and says so, also if the server had begun to continue. Without an unfinished snapshot, the same error ends the watch.
func TestWatchBeginsALostSnapshotAgain(t *testing.T) {
	for _, lost := range []kvpb.ErrorReason{kvpb.ErrorReason_ERROR_REASON_HISTORY_GONE, kvpb.ErrorReason_ERROR_REASON_SNAPSHOT_GONE} {
		created := &kvpb.WatchResponse{Body: &kvpb.WatchResponse_Created{Created: &kvpb.WatchCreated{AfterEpoch: 7}}}
		f := &feedScript{}
		f.scripts = []func(func(*kvpb.WatchResponse)) error{
			func(send func(*kvpb.WatchResponse)) error {
				send(created)
				send(snapshotPart("A", false, "a"))
				return status.Error(codes.Unavailable, "restart")
			},
			func(send func(*kvpb.WatchResponse)) error {
				send(created)
				send(endedWith(lost))
				return nil
			},
			func(send func(*kvpb.WatchResponse)) error {
				send(created)
				send(snapshotPart("B", false, "b"))
				send(snapshotPart("C", true, "c"))
				send(endedWith(lost))
				return nil
			},
		}
		var got []string
		c := dialFeed(t, f)
		for u, err := range c.Watch(t.Context(), []client.Range{{}}, client.WatchOptions{Snapshot: true}) {
			if e, ok := errors.AsType[*client.Error](err); ok {
				got = append(got, e.Reason.Reason())
				break
			}
			got = append(got, fmt.Sprintf("begin=%v partial=%v %s %s", u.Begin, u.Partial, u.Snapshot[0].Key, u.Token))
		}
		want := []string{"begin=true partial=true a A", "begin=true partial=true b B", "begin=false partial=false c C", lost.Reason()}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("got  %q\nwant %q", got, want)
		}
		f.mu.Lock()
		starts := fmt.Sprint(f.starts)
		f.mu.Unlock()
		if starts != "[snapshot token A snapshot]" {
			t.Errorf("the watches began with %s", starts)
		}
	}
}

// TestAnEmptyTokenIsNone: a consumer may have stored that none has come yet. Then what it has of an earlier snapshot does not count.
func TestAnEmptyTokenIsNone(t *testing.T) {
	f := &feedScript{}
	f.scripts = []func(func(*kvpb.WatchResponse)) error{func(send func(*kvpb.WatchResponse)) error {
		send(snapshotPart("A", true, "a"))
		return nil
	}}
	for u, err := range dialFeed(t, f).Watch(t.Context(), []client.Range{{}}, client.WatchOptions{Snapshot: true, Token: []byte{}}) {
		if err != nil || !u.Begin {
			t.Fatalf("%+v, %v: the snapshot does not begin", u, err)
		}
		break
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if got := fmt.Sprint(f.starts); got != "[snapshot]" {
		t.Fatalf("the watch began with %s", got)
	}
}

// TestAWatchSaysWhereItBegins: a consumer that ends before the first change misses none, if it has kept the token.
func TestAWatchSaysWhereItBegins(t *testing.T) {
	created := &kvpb.WatchResponse{Body: &kvpb.WatchResponse_Created{Created: &kvpb.WatchCreated{AfterEpoch: 7}}, ResumeToken: []byte("A")}
	f := &feedScript{}
	f.scripts = []func(func(*kvpb.WatchResponse)) error{
		func(send func(*kvpb.WatchResponse)) error {
			send(created)
			return status.Error(codes.Unavailable, "restart")
		},
		func(send func(*kvpb.WatchResponse)) error {
			send(created) // the caller knows it
			send(endedWith(kvpb.ErrorReason_ERROR_REASON_HISTORY_GONE))
			return nil
		},
	}
	var got []string
	for u, err := range dialFeed(t, f).Watch(t.Context(), []client.Range{{}}, client.WatchOptions{}) {
		if err != nil {
			break
		}
		got = append(got, fmt.Sprintf("%d commits, epoch %d, token %s", len(u.Commits), u.Epoch, u.Token))
	}
	if want := "[0 commits, epoch 7, token A]"; fmt.Sprint(got) != want {
		t.Errorf("got %q, want %s", got, want)
	}
}

// dialFeed serves a FeedService until the test ends.
func dialFeed(t *testing.T, f kvpb.FeedServiceServer) *client.Client {
	t.Helper()
	return serveFake(t, func(g *grpc.Server) { kvpb.RegisterFeedServiceServer(g, f) },
		client.WithRetry(client.Retry{Attempts: 3, Base: time.Millisecond, Max: time.Millisecond}))
}
