package epochkvv1

import (
	"bytes"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/protobuf/proto"
)

func TestEveryReasonParsesBack(t *testing.T) {
	for number, name := range ErrorReason_name {
		r := ErrorReason(number)
		if reasonPrefix+r.Reason() != name {
			t.Errorf("reason of %s is %q", name, r.Reason())
		}
		if got := ParseReason(r.Reason()); got != r {
			t.Errorf("ParseReason(%q) = %v, want %v", r.Reason(), got, r)
		}
	}
	if got := ParseReason("FROM_THE_FUTURE"); got != ErrorReason_ERROR_REASON_UNSPECIFIED {
		t.Errorf("an unknown reason parsed as %v", got)
	}
}

// The reflection-free codec and the ordinary one must agree, or a client in another language reads
// something else.
func TestBothCodecsAgreeOnPipelineMessages(t *testing.T) {
	messages := []interface {
		proto.Message
		MarshalVT() ([]byte, error)
		UnmarshalVT([]byte) error
	}{
		&PipelineRequest{Id: 7, Request: &PipelineRequest_Put{Put: &PutRequest{
			Key: []byte("k"), Value: []byte("v"), Durability: Durability_DURABILITY_ASYNC,
			Preconditions: []*Precondition{
				{Key: []byte("a"), Condition: &Precondition_Exists{Exists: false}},
				{Key: []byte("b"), Condition: &Precondition_ValueEquals{ValueEquals: nil}},
				{Key: []byte("c"), Condition: &Precondition_EpochEquals{EpochEquals: 9}},
			},
		}}},
		&PipelineResponse{Id: 8, Response: &PipelineResponse_Error{Error: &status.Status{Code: 9, Message: "no"}}},
		&ScanResponse{Entries: []*Entry{{Key: []byte{0, 255}, Epoch: 1 << 55}}, Count: 1, ReadEpoch: 3},
	}
	for _, m := range messages {
		fast, err := m.MarshalVT()
		if err != nil {
			t.Fatal(err)
		}
		slow, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(fast, slow) {
			t.Errorf("%T: codecs disagree:\n%x\n%x", m, fast, slow)
		}
		back := m.ProtoReflect().New().Interface()
		if err := back.(interface{ UnmarshalVT([]byte) error }).UnmarshalVT(slow); err != nil {
			t.Fatal(err)
		}
		if !proto.Equal(m, back) {
			t.Errorf("%T: came back as %v, want %v", m, back, m)
		}
	}
}
