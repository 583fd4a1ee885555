package server

import (
	"bytes"
	"testing"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/keys"
)

// A token has no secret: every client can make one. So the key in it must be inside the range of the request, which is what
// the rights of the caller are compared with.
func TestForgedTokenReadsNothingOutsideTheRange(t *testing.T) {
	h := mustStart(t, retainingQuietly)
	feed := pb.NewFeedServiceClient(h.conn)
	for _, key := range []string{"a/canary", "b/1", "b/2", "c/canary"} {
		h.mustPut(t, key, "v")
	}
	b, err := toBounds(&pb.KeyRange{Prefix: []byte("b/")})
	if err != nil {
		t.Fatal(err)
	}
	at := h.store.Visible()
	scan := func(t *testing.T, reverse bool, last string) (*pb.ScanResponse, error) {
		forged := appendToken(nil, token{epoch: at, reverse: reverse, last: []byte(last), bounds: hashBounds(b), store: h.storeID})
		stream, err := h.kv.Scan(testContext(t), &pb.ScanRequest{Range: &pb.KeyRange{Prefix: []byte("b/")}, Reverse: reverse, ResumeToken: forged})
		if err != nil {
			return nil, err
		}
		return stream.Recv()
	}
	past := func(last string, epoch, kind uint64) []byte {
		f := &feedService{Server: h.Server}
		return f.appendPastToken(pastToken{from: 1, to: at, key: []byte(last), epoch: keys.Epoch(epoch)}, hashPast(b, kind, 1, 0, 0, 0))
	}
	forms := map[string]func(t *testing.T, last string) (any, error){
		"scan":         func(t *testing.T, last string) (any, error) { return scan(t, false, last) },
		"reverse scan": func(t *testing.T, last string) (any, error) { return scan(t, true, last) },
		"history": func(t *testing.T, last string) (any, error) {
			return feed.History(testContext(t), &pb.HistoryRequest{Range: &pb.KeyRange{Prefix: []byte("b/")}, FromEpoch: 1, ResumeToken: past(last, uint64(at), historyToken)})
		},
		"diff": func(t *testing.T, last string) (any, error) {
			return feed.Diff(testContext(t), &pb.DiffRequest{Range: &pb.KeyRange{Prefix: []byte("b/")}, FromEpoch: 1, ResumeToken: past(last, 0, diffToken)})
		},
	}
	for name, ask := range forms {
		t.Run(name, func(t *testing.T) {
			for _, last := range []string{"a", "a/canary", "b.", "b0", "c", "c/canary", "d"} {
				out, err := ask(t, last)
				if err == nil {
					t.Errorf("last key %q: got %v", last, out)
					continue
				}
				f := failureOf(t, err)
				f.want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_RESUME_TOKEN)
				if bytes.Contains([]byte(err.Error()), []byte("canary")) {
					t.Errorf("last key %q: %v", last, err)
				}
			}
			if _, err := ask(t, "b/1"); err != nil {
				t.Errorf("a key of the range: %v", err)
			}
		})
	}
}
