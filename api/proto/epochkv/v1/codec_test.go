package epochkvv1

import (
	"bytes"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/encoding"
	protocodec "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
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

// pooledMessage is a message with a pool that counts the buffers which are in use.
type pooledMessage struct {
	*WatchResponse
	used int
}

func (m *pooledMessage) BufferPool() mem.BufferPool { return m }

func (m *pooledMessage) Get(length int) *[]byte {
	m.used++
	return Buffers.Get(length)
}

func (m *pooledMessage) Put(b *[]byte) {
	m.used--
	Buffers.Put(b)
}

// TestBuffersOfAllSizesAreGivenBack to the pool of their message: so it learns when the transport is done with it, however small it is.
func TestBuffersOfAllSizesAreGivenBack(t *testing.T) {
	for _, size := range []int{0, 1, 1000, 1024, 1025, 1 << 20, 3 << 20} {
		m := &pooledMessage{WatchResponse: &WatchResponse{ResumeToken: make([]byte, size)}}
		encoded, err := NewCodec().Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		if m.used != 1 || encoded.Len() != m.SizeVT() {
			t.Errorf("%d bytes: %d buffers are used for %d bytes", size, m.used, encoded.Len())
		}
		if encoded.Free(); m.used != 0 {
			t.Errorf("%d bytes: the buffer is not given back", size)
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
