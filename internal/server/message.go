package server

import (
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// pooledBytesMax is the largest buffer that a stream reuses for the next request.
const pooledBytesMax = 64 << 10

// pipelineRequest is a PipelineRequest that is reused, so that receiving allocates nothing. It has
// one message of each kind, and sets the right one before the generated decoder fills it.
type pipelineRequest struct {
	msg      pb.PipelineRequest
	size     int   // that the message is admitted with
	failed   error // why the message could not be decoded
	received int   // bytes decoded since the messages were last reset as a whole
	extra    int   // of these, about what messages keep beside the keys and values of single gets, puts and deletes

	get         pb.PipelineRequest_Get
	put         pb.PipelineRequest_Put
	delete      pb.PipelineRequest_Delete
	batchGet    pb.PipelineRequest_BatchGet
	batchWrite  pb.PipelineRequest_BatchWrite
	deleteRange pb.PipelineRequest_DeleteRange
}

func (r *pipelineRequest) init() {
	r.get.Get = new(pb.GetRequest)
	r.put.Put = new(pb.PutRequest)
	r.delete.Delete = new(pb.DeleteRequest)
	r.batchGet.BatchGet = new(pb.BatchGetRequest)
	r.batchWrite.BatchWrite = new(pb.BatchWriteRequest)
	r.deleteRange.DeleteRange = new(pb.DeleteRangeRequest)
}

// reset drops the current request.
func (r *pipelineRequest) reset() {
	r.size, r.received, r.extra = 0, 0, 0
	r.msg.Reset()
	r.init()
}

// memoryBytes is about what the messages keep until the next request, and for it.
func (r *pipelineRequest) memoryBytes() int {
	put, del := r.put.Put, r.delete.Delete
	return cap(r.get.Get.Key) + cap(put.Key) + cap(put.Value) + cap(put.RequestId) + cap(del.Key) + cap(del.RequestId) + r.extra
}

// resetEvery bounds the memory that a client can make a reused message collect: buffers of its largest messages, and unknown fields
// of the message around a request, which the generated decoder stores until the message is reset as a whole. That reset takes a tenth
// of the time of decoding a small request.
const resetEvery = 64 << 10

// UnmarshalVT is called by the codec for a received message. It keeps its error in failed: if it returned the error, the gRPC
// library would end the stream at once, without the answers that still wait.
func (r *pipelineRequest) UnmarshalVT(data []byte) error {
	size := len(data)
	if size >= countedMessageMin {
		p, _ := pipelinedOf(data, pipelineDescriptor) // boundedCodec has refused what is malformed
		size = p.bytes(data, kindOf(p.method))
	}
	r.failed = r.decode(data, size)
	return nil
}

// decode decodes a message, which is admitted with a number of bytes.
func (r *pipelineRequest) decode(data []byte, size int) error {
	r.size = size
	r.received += len(data)
	if r.received > resetEvery {
		r.resetExtra()
	}
	r.msg.Id, r.msg.Request = 0, nil
	r.choose(peekKind(data))
	err := r.msg.UnmarshalVT(data)
	r.extra += r.extraBytes(len(data))
	return err
}

// resetExtra drops all but the keys and values of single gets, puts and deletes. Each mutation of a batch has the buffers of the largest one that was in
// its place.
func (r *pipelineRequest) resetExtra() {
	get, put, del := r.get.Get, r.put.Put, r.delete.Delete
	r.msg.Reset()
	r.init()
	r.get.Get.Key, r.delete.Delete.Key, r.delete.Delete.RequestId = get.Key, del.Key, del.RequestId
	r.put.Put.Key, r.put.Put.Value, r.put.Put.RequestId = put.Key, put.Value, put.RequestId
	r.received, r.extra = 0, 0
}

// extraBytes is about what the request at hand, of an encoding of so many bytes, keeps beside a key and a value.
func (r *pipelineRequest) extraBytes(encoded int) int {
	elements, rest := 0, encoded
	switch m := r.msg.Request.(type) {
	case *pb.PipelineRequest_Get:
		rest -= len(m.Get.Key)
	case *pb.PipelineRequest_Put:
		elements, rest = len(m.Put.Preconditions), rest-len(m.Put.Key)-len(m.Put.Value)-len(m.Put.RequestId)
	case *pb.PipelineRequest_Delete:
		elements, rest = len(m.Delete.Preconditions), rest-len(m.Delete.Key)-len(m.Delete.RequestId)
	case *pb.PipelineRequest_BatchGet:
		elements = len(m.BatchGet.Keys)
	case *pb.PipelineRequest_BatchWrite:
		elements = len(m.BatchWrite.Mutations) + len(m.BatchWrite.Preconditions)
	case *pb.PipelineRequest_DeleteRange:
		elements = len(m.DeleteRange.Preconditions)
	case *pb.PipelineRequest_InvokeAll:
		elements = len(m.InvokeAll.Invocations)
	}
	if elements == 0 && rest <= extraUncounted {
		return 0
	}
	return elements*extraElementBytes + rest
}

const (
	extraUncounted    = 128 // more than the numbers of a request take
	extraElementBytes = 160 // about a message of a list
)

// choose empties the message of the kind that is received next and sets it in the request.
func (r *pipelineRequest) choose(kind int) {
	switch kind {
	case 2:
		reuseGet(r.get.Get)
		r.msg.Request = &r.get
	case 3:
		reusePut(r.put.Put)
		r.msg.Request = &r.put
	case 4:
		r.delete.Delete.ResetVT()
		r.msg.Request = &r.delete
	case 5:
		r.batchGet.BatchGet.ResetVT()
		r.msg.Request = &r.batchGet
	case 6:
		r.batchWrite.BatchWrite.ResetVT()
		r.msg.Request = &r.batchWrite
	case 7:
		r.deleteRange.DeleteRange.ResetVT()
		r.msg.Request = &r.deleteRange
	}
}

// reuseGet empties a message and keeps its buffer.
func reuseGet(m *pb.GetRequest) {
	if hasUnknown(m) {
		m.ResetVT()
	}
	m.Key, m.SnapshotEpoch, m.SnapshotTimeUs = m.Key[:0], 0, 0
}

// reusePut empties a message and keeps its buffers.
func reusePut(m *pb.PutRequest) {
	if len(m.Preconditions) > 0 || hasUnknown(m) {
		m.ResetVT()
	}
	m.Key, m.Value, m.Durability, m.LeaseId, m.RequestId = m.Key[:0], m.Value[:0], 0, 0, m.RequestId[:0]
	m.TtlMs, m.ExpiresAtMs, m.ReturnCurrent = 0, 0, false
}

// hasUnknown reports whether a message has fields that this version does not know. The generated decoder adds those of the next message
// to them: they would be part of its hash, and of ever more memory.
func hasUnknown(m proto.Message) bool { return len(m.ProtoReflect().GetUnknown()) > 0 }

// peekKind returns the field number of the request in an encoded PipelineRequest in the form that
// encoders write: an optional id first. For any other form it returns zero, and the decoder finds
// the kind.
func peekKind(data []byte) int {
	const idTag = 1 << 3 // field 1, a varint
	i := 0
	if len(data) > 0 && data[0] == idTag {
		for i = 1; i < len(data) && data[i] >= 0x80; i++ {
		}
		i++
	}
	if i >= len(data) || data[i]&7 != 2 || data[i] >= 0x80 {
		return 0
	}
	return int(data[i] >> 3)
}

// sender sends answers over a stream, one at a time, and reuses the message of each kind: gRPC has
// encoded a message when SendMsg returns.
type sender struct {
	stream grpc.ServerStream

	mu     sync.Mutex // the receiver and the acker send
	msg    pb.PipelineResponse
	get    pb.PipelineResponse_Get
	put    pb.PipelineResponse_Put
	delete pb.PipelineResponse_Delete
	batch  pb.PipelineResponse_BatchWrite
	failed pb.PipelineResponse_Error
}

func (s *sender) init(stream grpc.ServerStream) {
	s.stream = stream
	s.get.Get = new(pb.GetResponse)
	s.put.Put = new(pb.PutResponse)
	s.delete.Delete = new(pb.DeleteResponse)
	s.batch.BatchWrite = new(pb.BatchWriteResponse)
}

func (s *sender) send(a *answer) error {
	if a.status != nil { // instead of an answer
		a.charge.release()
		a.charge = nil
	}
	a.charge.handOver() // before it waits for one that the client does not take
	s.mu.Lock()
	s.fill(a)
	err := s.stream.SendMsg(a.charge.of(&s.msg))
	s.forget()
	s.mu.Unlock()
	if err != nil {
		a.charge.release()
	}
	if a.batchGet != nil {
		a.batchGet.ReturnToVTPool()
		a.batchGet = nil
	}
	return err
}

// forget drops the answer that was sent: the next one may come much later, and nothing counts this one any more.
func (s *sender) forget() { s.msg.Response, s.get.Get.Value, s.failed.Error = nil, nil, nil }

func (s *sender) fill(a *answer) {
	s.msg.Id = a.id
	if a.status != nil {
		s.failed.Error = a.status.Proto()
		s.msg.Response = &s.failed
		return
	}
	switch {
	case a.value != nil:
		g := s.get.Get
		g.Found, g.Value, g.Epoch, g.ReadEpoch, g.ExpiresAtMs = a.found, a.value, a.epoch, a.readEpoch, a.expiresAt
		s.msg.Response = &s.get
	case a.batchGet != nil:
		s.msg.Response = &pb.PipelineResponse_BatchGet{BatchGet: a.batchGet}
	case a.deleteRange != nil:
		s.msg.Response = &pb.PipelineResponse_DeleteRange{DeleteRange: a.deleteRange}
	case a.invoke != nil:
		s.msg.Response = &pb.PipelineResponse_Invoke{Invoke: a.invoke}
	case a.invokeAll != nil:
		s.msg.Response = &pb.PipelineResponse_InvokeAll{InvokeAll: a.invokeAll}
	default:
		s.fillWrite(a)
	}
}

func (s *sender) fillWrite(a *answer) {
	switch a.method {
	case telemetry.MethodPut:
		s.put.Put.Epoch, s.put.Put.Deduplicated = a.epoch, a.deduplicated
		s.msg.Response = &s.put
	case telemetry.MethodDelete:
		s.delete.Delete.Epoch, s.delete.Delete.Deduplicated = a.epoch, a.deduplicated
		s.msg.Response = &s.delete
	default:
		s.batch.BatchWrite.Epoch, s.batch.BatchWrite.Deduplicated = a.epoch, a.deduplicated
		s.msg.Response = &s.batch
	}
}
