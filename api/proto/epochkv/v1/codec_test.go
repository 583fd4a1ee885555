package epochkvv1

import (
	"bytes"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/encoding"
	protocodec "google.golang.org/grpc/encoding/proto"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// A peer with the standard codec must see no difference, for any message of any size.
func TestCodecIsInterchangeableWithTheStandardOne(t *testing.T) {
	standard, ours := encoding.GetCodecV2(protocodec.Name), NewCodec()
	for _, m := range []proto.Message{
		&PutRequest{Key: []byte("k"), Value: []byte("small")},
		&PutRequest{Key: []byte("k"), Value: bytes.Repeat([]byte("large"), 1<<18)},
		&GetRequest{},
		&WatchResponse{
			WatchId: 1, ResumeToken: []byte("t"), Body: &WatchResponse_Changes{Changes: &WatchChanges{Commits: []*ChangedCommit{{
				Epoch: 2, Time: &timestamppb.Timestamp{Seconds: 3, Nanos: 4}, Origin: CommitOrigin_COMMIT_ORIGIN_CLIENT, End: true,
				Events: []*ChangeEvent{{Kind: EventKind_EVENT_KIND_SET, Key: []byte("k"), Value: []byte("v"), PreviousValue: []byte{}, LeaseId: 5, ExpiresAtMs: 6}},
			}}}},
		},
		&WatchResponse{WatchId: 1, Body: &WatchResponse_Ended{Ended: &WatchEnded{Error: &status.Status{Code: 3, Message: "not of this package"}}}},
		&StatusResponse{Health: &Health{Conditions: []*Condition{{Name: "disk"}}}, Limits: &Limits{}},
		&ResizeCacheRequest{CacheBytes: 1 << 30},
		&status.Status{Code: 3, Message: "not of this package"},
	} {
		theirs, err := standard.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		fast, err := ours.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(theirs.Materialize(), fast.Materialize()) {
			t.Errorf("%T: the codecs write different bytes", m)
		}
		back := m.ProtoReflect().New().Interface()
		if err := ours.Unmarshal(theirs, back); err != nil {
			t.Fatal(err)
		}
		theirs.Free()
		fast.Free()
		if !proto.Equal(m, back) {
			t.Errorf("%T came back changed", m)
		}
	}
}

func TestCodecRefusesGarbage(t *testing.T) {
	garbage, err := NewCodec().Marshal(&status.Status{Message: "a string where a message is expected"})
	if err != nil {
		t.Fatal(err)
	}
	if err := NewCodec().Unmarshal(garbage, &ScanResponse{}); err == nil {
		t.Error("garbage was taken for a message")
	}
}

// TestOnlyHotMessagesHaveGeneratedMarshalling: everything that a stream of requests sends, and
// nothing of AdminService.
func TestOnlyHotMessagesHaveGeneratedMarshalling(t *testing.T) {
	for _, m := range []any{
		&GetRequest{}, &PutResponse{}, &BatchWriteRequest{}, &ScanResponse{}, &PipelineRequest{}, &InvokeAllResponse{}, &BulkLoadRequest{},
		&TransactRequest{}, &TransactResponse{}, &ExecuteRequest{}, &ExecuteResponse{}, &WatchRequest{}, &WatchResponse{},
	} {
		_, encodes := m.(fastMarshaler)
		_, decodes := m.(fastUnmarshaler)
		if !encodes || !decodes {
			t.Errorf("%T is marshalled with reflection", m)
		}
	}
	for _, m := range []any{&StatusResponse{}, &VerifyResponse{}, &SpaceResponse{}} {
		if _, encodes := m.(fastMarshaler); encodes {
			t.Errorf("%T has generated marshalling, which nothing hot needs", m)
		}
	}
}
