package server

import (
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// contents is what can be said of an encoded message before it is decoded. An element, of which two
// bytes may be all that is encoded, takes 100 bytes and more when it is decoded and executed. So the
// elements are counted first: more than the limit are refused, and the others are admitted with what
// they will take.
type contents struct {
	elements int // messages and byte strings in it
	most     int // of them, those of the field that has the most
}

// elementBytes is what an operation takes in memory beside its encoding until it has been executed:
// messages, slices that have doubled, and the batch. Measured with keys of a few bytes: 245 to 300 for
// a write, 150 to 200 for a read, 680 to 900 for an invocation.
var elementBytes = [...]int{kindWrite: 384, kindRead: 224, kindWriteAndRead: config.OperationBytes}

// countedMessageMin is the size of the smallest message whose elements are counted. The elements of a
// smaller one are few.
const countedMessageMin = 256

// fieldsCounted bounds the fields whose elements are counted apart. No request has that many.
const fieldsCounted = 16

// contentsOf counts the elements of a message. What cannot be decoded is not counted.
func contentsOf(message []byte) (c contents) {
	var counts [fieldsCounted]int
	for len(message) > 0 {
		field, payload, rest := cutField(message)
		if rest == nil {
			break
		}
		if payload != nil {
			c.elements++
			counts[min(field, fieldsCounted-1)]++
		}
		message = rest
	}
	for _, n := range counts {
		c.most = max(c.most, n)
	}
	return c
}

// cutField returns the first field of a message, its bytes if it is a message or a byte string, and the
// rest of the message. All are nil if there is no field.
func cutField(message []byte) (field int, payload, rest []byte) {
	if len(message) > 1 && message[0]&0x87 == byte(protowire.BytesType) && message[1] < 0x80 && 2+int(message[1]) <= len(message) {
		end := 2 + int(message[1])
		return int(message[0] >> 3), message[2:end:end], message[end:]
	}
	number, kind, n := protowire.ConsumeTag(message)
	if n < 0 {
		return 0, nil, nil
	}
	if kind != protowire.BytesType {
		m := protowire.ConsumeFieldValue(number, kind, message[n:])
		if m < 0 {
			return 0, nil, nil
		}
		return int(number), nil, message[n+m:]
	}
	payload, m := protowire.ConsumeBytes(message[n:])
	if m < 0 {
		return 0, nil, nil
	}
	return int(number), payload, message[n+m:]
}

// pipelinedContents is what can be said of an encoded PipelineRequest before it is decoded.
type pipelinedContents struct {
	contents // of the request, or of all if there are several, as no client sends
	id       uint64
	method   telemetry.Method
}

// pipelinedMethods are the methods of the fields of a PipelineRequest, from the second on.
var pipelinedMethods = [...]telemetry.Method{
	telemetry.MethodGet, telemetry.MethodPut, telemetry.MethodDelete, telemetry.MethodBatchGet, telemetry.MethodBatchWrite,
	telemetry.MethodDeleteRange, telemetry.MethodInvoke, telemetry.MethodInvokeAll,
}

func pipelinedOf(message []byte) pipelinedContents {
	p := pipelinedContents{method: telemetry.MethodPipeline}
	for len(message) > 0 {
		field, payload, rest := cutField(message)
		if rest == nil {
			break
		}
		switch i := field - 2; {
		case payload != nil:
			inner := contentsOf(payload)
			p.elements, p.most = p.elements+inner.elements, max(p.most, inner.most)
			if i >= 0 && i < len(pipelinedMethods) {
				p.method = pipelinedMethods[i] // the last one is decoded
			}
		case field == 1:
			p.id, _ = protowire.ConsumeVarint(message[1:])
		}
		message = rest
	}
	return p
}

// bytes is what a message with these contents is admitted with.
func (c contents) bytes(message []byte, k kind) int { return len(message) + c.elements*elementBytes[k] }

// check refuses what no limit of operations allows.
func (c contents) check(limits *mvcc.Limits) error {
	if c.most > limits.BatchOps {
		return &mvcc.LimitError{What: "batch operations", Limit: limits.BatchOps, Got: c.most}
	}
	return nil
}

// boundedCodec decodes no message with far more elements than the limit of operations, because its
// handler would refuse it only once it has been decoded, and not too many others at once.
type boundedCodec struct {
	pb.Codec
	limits    *mvcc.Limits
	decoding  *decoding
	unaryEnds bool // the next that happens to a decoded unary request is its admission
}

// Unmarshal implements encoding.CodecV2.
func (c boundedCodec) Unmarshal(data mem.BufferSlice, v any) error {
	if data.Len() < countedMessageMin {
		return c.Codec.Unmarshal(data, v)
	}
	buf := data.MaterializeToBuffer(pb.Buffers)
	defer buf.Free()
	found, size := decodedBytes(buf.ReadOnlyData(), v)
	most := max(found.most, contentsOf(buf.ReadOnlyData()).most)
	if most > 2*c.limits.BatchOps+fieldsCounted { // the handlers of others say which limit it is
		return contents{most: most}.check(c.limits)
	}
	if size < countedBytesMin {
		return c.Codec.Unmarshal(mem.BufferSlice{buf}, v)
	}
	c.decoding.begin(v, size)
	err := c.Codec.Unmarshal(mem.BufferSlice{buf}, v)
	if err != nil || !c.endsAtAdmission(v) {
		c.decoding.end(v)
	}
	return err
}

// admittedBytes is what a decoded request is admitted with.
func admittedBytes(req any, k kind) int {
	size, elements := 0, 0
	if m, ok := req.(interface{ SizeVT() int }); ok {
		size = m.SizeVT()
	}
	switch m := req.(type) {
	case *pb.HistoryRequest, *pb.DiffRequest:
		size = 2 * historyBytesMax // of the answer, as versions and as messages; larger values are admitted when they are read
	case *pb.BatchGetRequest:
		elements = len(m.Keys)
	case *pb.BatchWriteRequest:
		elements = len(m.Mutations) + len(m.Preconditions)
	case *pb.InvokeAllRequest:
		elements = len(m.Invocations) + len(m.Preconditions)
	case *pb.ExecuteRequest:
		elements = len(m.Conditions) + len(m.ThenOperations) + len(m.ElseOperations)
	case interface{ GetPreconditions() []*pb.Precondition }:
		elements = len(m.GetPreconditions())
	}
	return size + elements*elementBytes[k]
}
