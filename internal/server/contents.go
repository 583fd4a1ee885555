package server

import (
	"context"
	"errors"
	"strings"

	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

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
	elements   int // messages and byte strings in it
	most       int // of them, those of the field that has the most
	operations int // of them, those of both lists, if it is an ExecuteRequest
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

// errMalformed is a message that cannot be cut into fields, as the standard decoder says it. The generated decoder accepts some of these, such
// as a group that ends with another number: what comes after would be decoded and not counted.
var errMalformed = errors.New("proto: a field is malformed")

// contentsOf counts the elements of a message.
func contentsOf(message []byte) (c contents, err error) {
	var counts [fieldsCounted]int
	for len(message) > 0 {
		field, payload, rest := cutField(message)
		if rest == nil {
			return c, errMalformed
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
	c.operations = counts[executeThen] + counts[executeElse]
	return c, nil
}

// The fields of the lists of an ExecuteRequest.
const executeThen, executeElse = 2, 3

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
	contents // of the request, or of all if there are several, as no client sends: the decoder adds one to another of the same kind
	id       uint64
	method   telemetry.Method
}

// pipelinedMethods are the methods of the fields of a PipelineRequest, from the second on.
var pipelinedMethods = [...]telemetry.Method{
	telemetry.MethodGet, telemetry.MethodPut, telemetry.MethodDelete, telemetry.MethodBatchGet, telemetry.MethodBatchWrite,
	telemetry.MethodDeleteRange, telemetry.MethodInvoke, telemetry.MethodInvokeAll,
}

// pipelinedOf counts the elements of the request in a message, which may as well be one of another stream whose requests are in a oneof.
func pipelinedOf(message []byte, of protoreflect.MessageDescriptor) (p pipelinedContents, err error) {
	p.method = telemetry.MethodPipeline
	requests := 0
	for len(message) > 0 {
		field, payload, rest := cutField(message)
		if rest == nil {
			return p, errMalformed
		}
		switch i := field - 2; {
		case payload != nil:
			requests++
			if messageIn(of, field) == nil {
				break // of a newer version, perhaps no message
			}
			inner, err := contentsOf(payload)
			if err != nil {
				return p, err
			}
			p.elements, p.most = p.elements+inner.elements, p.most+inner.most
			if i >= 0 && i < len(pipelinedMethods) {
				p.method = pipelinedMethods[i] // the last one is decoded
			}
		case field == 1:
			p.id, _ = protowire.ConsumeVarint(message[1:])
		}
		message = rest
	}
	if requests > fieldsCounted { // each replaces the one before, but is decoded
		p.most = max(p.most, requests)
	}
	return p, nil
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

// checkLists refuses an ExecuteRequest with more operations than one list may have: both are in memory while one is executed.
func (c contents) checkLists(limits *mvcc.Limits) error {
	if c.operations > limits.BatchOps {
		return &mvcc.LimitError{What: "batch operations", Limit: limits.BatchOps, Got: c.operations}
	}
	return nil
}

// boundedCodec decodes no message with far more elements than the limit of operations, because its
// handler would refuse it only once it has been decoded, and not too many others at once.
type boundedCodec struct {
	pb.Codec
	limits   *mvcc.Limits
	decoding *decoding
}

// Unmarshal implements encoding.CodecV2.
func (c boundedCodec) Unmarshal(data mem.BufferSlice, v any) error {
	u, unary := v.(*unaryMessage)
	s, streamed := v.(*streamMessage)
	if streamed {
		v, s.bytes = s.request, data.Len()
	}
	if data.Len() < countedMessageMin {
		if unary {
			v = u.request
		}
		return c.Codec.Unmarshal(data, v)
	}
	if unary {
		u.free() // of a message before, which makes the request an error
		u.set(data)
		return nil
	}
	buf := data.MaterializeToBuffer(pb.Buffers)
	defer buf.Free()
	ctx := context.Background()
	if streamed {
		ctx = s.ctx
	}
	_, err := c.decode(ctx, buf, v)
	if streamed {
		s.gaveUp = contextStatus(err)
	}
	return err
}

// decode decodes a message once there is room for it.
func (c boundedCodec) decode(ctx context.Context, buf mem.Buffer, v any) (found contents, err error) {
	found, size, err := decodedBytes(buf.ReadOnlyData(), v)
	if err == nil {
		err = c.check(found, buf.Len(), v)
	}
	if err == nil {
		err = checkFields(buf.ReadOnlyData(), descriptorOf(v), c.limits)
	}
	if p, pipelined := v.(*pipelineRequest); pipelined && errors.Is(err, errMalformed) {
		p.failed = err // as if it had been decoded
		return found, nil
	}
	if err != nil {
		return found, err
	}
	if size < countedBytesMin {
		return found, c.Codec.Unmarshal(mem.BufferSlice{buf}, v)
	}
	if err := c.decoding.begin(ctx, v, size); err != nil {
		return found, err
	}
	err = c.Codec.Unmarshal(mem.BufferSlice{buf}, v)
	if err != nil || !endsAtAdmission(v) {
		c.decoding.end(v)
	}
	return found, err
}

// check refuses a message that its handler would refuse for what it takes. The handlers of smaller ones say
// which limit it is.
func (c boundedCodec) check(found contents, bytes int, v any) error {
	if carriesOperations(v) {
		if _, execute := v.(*pb.ExecuteRequest); execute {
			if err := found.checkLists(c.limits); err != nil {
				return err
			}
		}
		if found.most > 2*c.limits.BatchOps+fieldsCounted {
			return found.check(c.limits)
		}
		return nil
	}
	most := c.plainMessageMax()
	if isForeign(v) {
		most = openMessageMax
	}
	if bytes > most {
		return &mvcc.LimitError{What: "batch bytes", Limit: most, Got: bytes}
	}
	if found.most > 2*leaseListMax {
		return &mvcc.LimitError{What: "batch operations", Limit: leaseListMax, Got: found.most}
	}
	return nil
}

// plainMessageMax is the largest message without operations.
func (c boundedCodec) plainMessageMax() int { return 2*watchRangesMax*c.limits.KeyBytes + plainBytes }

// openMessageMax is the largest message to a method that clients may call which are not known. It names a service or a symbol, or has a password. An
// answer of reflection repeats all of it, twice.
const openMessageMax = 4 << 10

func isForeign(message any) bool {
	m, ok := message.(proto.Message)
	return ok && !strings.HasPrefix(string(m.ProtoReflect().Descriptor().FullName()), "epochkv.")
}

// plainBytes is room for what a message without operations has beside keys: numbers and tokens.
const plainBytes = 256 << 10

// carriesOperations reports whether a message has operations or values. The largest one of the others is that
// which creates a watch.
func carriesOperations(message any) bool {
	switch message.(type) {
	case *pipelineRequest, *pb.TransactRequest, *bulkMessage:
		return true
	case *pb.HistoryRequest, *pb.DiffRequest, *pb.GetOutcomeRequest:
		return false
	}
	_, known := methodOf(message)
	return known
}

// unaryMessage is the message of a unary request until the end of the request has come. The transports decode
// the message and then wait for the end, which may never come, so the codec stores the encoded message.
type unaryMessage struct {
	request any             // to decode into
	encoded mem.Buffer      // nil if the message is small and was decoded, or in parts
	parts   mem.BufferSlice // of a large message, as they were received, until it is admitted
}

func (u *unaryMessage) set(data mem.BufferSlice) {
	if data.Len() < receivedBytesMin {
		u.encoded = data.MaterializeToBuffer(pb.Buffers)
		return
	}
	data.Ref()
	u.parts = data
}

// join makes one buffer of the parts.
func (u *unaryMessage) join() {
	u.encoded = u.parts.MaterializeToBuffer(pb.Buffers)
	u.parts.Free()
	u.parts = nil
}

func (u *unaryMessage) free() {
	u.parts.Free()
	u.parts = nil
	if u.encoded != nil {
		u.encoded.Free()
		u.encoded = nil
	}
}

// streamMessage is a message of a stream, which waits to be decoded no longer than its context.
type streamMessage struct {
	ctx     context.Context // the codec gets no other argument
	request any
	bytes   int            // of the encoded message
	gaveUp  *status.Status // set if the context ended before there was room
}

// receiveUnary receives the one message of a unary request and its end, and then decodes the message. A large one is admitted before it is copied and
// decoded, with the bytes that it has encoded. The size is what it takes, zero if that is little.
func (c boundedCodec) receiveUnary(ctx context.Context, receive func(any) error, request any, admit func(bytes int) error) (size int, err error) {
	u := unaryMessage{request: request}
	defer u.free()
	if err := receive(&u); err != nil {
		return 0, err
	}
	if u.parts != nil {
		if err := admit(u.parts.Len()); err != nil {
			return 0, err
		}
		u.join()
	}
	if u.encoded == nil {
		return 0, nil
	}
	found, err := c.decode(ctx, u.encoded, request)
	if tooMany := new(mvcc.LimitError); errors.As(err, &tooMany) || contextStatus(err) != nil {
		return 0, statusOf(err).Err()
	}
	if err != nil {
		return 0, undecodable(err)
	}
	if u.encoded.Len() < countedBytesMin {
		return 0, nil
	}
	return found.bytes(u.encoded.ReadOnlyData(), kindRead), nil
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
