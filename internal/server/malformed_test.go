package server

import (
	"bytes"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// malformedFields are fields that the generated decoder accepts, and the standard one does not, wherever they are.
var malformedFields = [][]byte{
	{13<<3 | 3, 14<<3 | 4},                                                                      // a group that ends with another number
	{0xe0, 0x80, 0x80, 0x80, 0x80, 0x01, 0x01},                                                  // a field number above 2^31
	{12 << 3, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f},                       // a varint above 64 bits
	{0xe0, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x02, 0x01},                          // a tag above 64 bits
	{13<<3 | 2, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x02},                     // a length above 64 bits
	{13<<3 | 3, 13<<3 | 3, 13<<3 | 4, 1<<3 | 2, 1, 0, 14<<3 | 4},                                // as the first, with a field in it
	append(bytes.Repeat([]byte{13<<3 | 3}, 10_003), bytes.Repeat([]byte{13<<3 | 4}, 10_003)...), // nested groups
}

// encodings makes random encodings of messages.
type encodings struct {
	*rand.Rand
	malformed bool // one of malformedFields is in what was made
	budget    int  // fields that may still be made
}

// message makes fields that a message has, that replace or add to each other, and that it does not know.
func (r *encodings) message(of protoreflect.MessageDescriptor) (m []byte) {
	known := of.Fields()
	for range r.IntN(8) {
		if r.budget--; r.budget < 0 {
			break
		}
		if known.Len() == 0 || r.IntN(6) == 0 {
			m = append(m, r.unknown()...)
			continue
		}
		f := known.Get(r.IntN(known.Len()))
		switch kind := f.Kind(); {
		case r.IntN(200) == 0:
			m = protowire.AppendVarint(protowire.AppendTag(m, f.Number(), protowire.VarintType), r.Uint64()>>r.IntN(64)) // mostly of the wrong type
		case f.Message() != nil:
			inner := r.message(f.Message())
			for range 1 + r.IntN(3) {
				m = protowire.AppendBytes(protowire.AppendTag(m, f.Number(), protowire.BytesType), inner)
			}
		case kind == protoreflect.BytesKind || kind == protoreflect.StringKind || f.IsList():
			m = protowire.AppendBytes(protowire.AppendTag(m, f.Number(), protowire.BytesType), make([]byte, r.IntN(4)))
		case kind == protoreflect.DoubleKind || kind == protoreflect.Fixed64Kind || kind == protoreflect.Sfixed64Kind:
			m = protowire.AppendFixed64(protowire.AppendTag(m, f.Number(), protowire.Fixed64Type), r.Uint64())
		default:
			m = protowire.AppendVarint(protowire.AppendTag(m, f.Number(), protowire.VarintType), r.Uint64()>>r.IntN(64))
		}
	}
	return m
}

// unknown makes fields that no message has, such as a newer client may send; rarely a malformed one.
func (r *encodings) unknown() []byte {
	number := protowire.Number(1000 + r.IntN(100))
	switch r.IntN(6) {
	case 0:
		return protowire.AppendBytes(protowire.AppendTag(nil, number, protowire.BytesType), []byte{0xff, 0x07, 0x0c}[:r.IntN(4)]) // no message
	case 1:
		return protowire.AppendFixed32(protowire.AppendTag(nil, number, protowire.Fixed32Type), r.Uint32())
	case 2:
		if r.IntN(2) == 0 {
			r.malformed = true
			return malformedFields[r.IntN(len(malformedFields)-1)] // the last one is long
		}
	case 3:
		return protowire.AppendVarint([]byte{0xc0, 0xbe, 0x80, 0x00}, 1) // a long form of a tag
	}
	inside := protowire.AppendBytes(protowire.AppendVarint([]byte{1 << 3}, r.Uint64()), nil)
	inside = append(protowire.AppendTag(nil, 5, protowire.StartGroupType), append(inside[:len(inside)-1], 5<<3|4)...)
	return protowire.AppendTag(append(protowire.AppendTag(nil, number, protowire.StartGroupType), inside...), number, protowire.EndGroupType)
}

// contentsOfDecoded are the elements of a decoded message, and its fields on all levels.
func contentsOfDecoded(m protoreflect.Message) (c contents, fields int) {
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		n, isMessage := 1, f.Message() != nil
		element := isMessage || f.Kind() == protoreflect.BytesKind || f.Kind() == protoreflect.StringKind
		if f.IsList() && element {
			n = v.List().Len()
		}
		if fields += n; element {
			c.elements, c.most = c.elements+n, max(c.most, n)
		}
		for i := range n {
			switch {
			case isMessage && f.IsList():
				_, inner := contentsOfDecoded(v.List().Get(i).Message())
				fields += inner
			case isMessage:
				_, inner := contentsOfDecoded(v.Message())
				fields += inner
			}
		}
		return true
	})
	return c, fields
}

// TestWhatIsDecodedIsCounted: for random encodings of all requests, whatever the generated decoder accepts is counted, or refused because it is
// malformed; and what the standard decoder accepts, as of a newer client, is never refused for that.
func TestWhatIsDecodedIsCounted(t *testing.T) {
	r := &encodings{Rand: rand.New(rand.NewPCG(22, 7))}
	codec := pb.NewCodec()
	var decodedN, legal, refused, beyond int
	one := func(input protoreflect.MessageDescriptor) {
		kind, err := protoregistry.GlobalTypes.FindMessageByName(input.FullName())
		if err != nil {
			t.Fatal(err)
		}
		r.malformed, r.budget = false, 200
		m := r.message(input)
		mutated := r.IntN(3) == 0 && len(m) > 0
		if mutated {
			m[r.IntN(len(m))] = byte(r.IntN(256))
		}
		q := kind.New()
		var request any = q.Interface()
		streams := input == pipelineDescriptor
		switch request.(type) {
		case *pb.PipelineRequest:
			request = new(pipelineRequest)
		case *pb.TransactRequest, *pb.WatchRequest:
			streams = true
		}
		c, _, err := decodedBytes(m, request)
		fields, failed := countFields(m, input, math.MaxInt)
		if err != nil && failed == nil {
			t.Fatalf("%s: %x is counted on all levels, but not on the first", input.Name(), m)
		}
		if r.malformed && !mutated && failed == nil {
			t.Fatalf("%s: %x is malformed and counted", input.Name(), m)
		}
		if proto.Unmarshal(m, kind.New().Interface()) == nil {
			if legal++; failed != nil {
				t.Fatalf("%s: %x is legal and refused: %v", input.Name(), m, failed)
			}
		}
		if codec.Unmarshal(mem.BufferSlice{mem.SliceBuffer(m)}, q.Interface()) != nil {
			return
		}
		decodedN++
		if failed != nil {
			refused++
		}
		got, has := contentsOfDecoded(q)
		if streams { // those of the request in it
			if got = (contents{}); q.WhichOneof(input.Oneofs().Get(0)) != nil {
				got, _ = contentsOfDecoded(q.Get(q.WhichOneof(input.Oneofs().Get(0))).Message())
			}
		}
		if err == nil && (c.elements < got.elements || c.most < got.most) {
			t.Fatalf("%s: %x is counted as %+v, and decoded as %+v", input.Name(), m, c, got)
		}
		if failed == nil && fields < has {
			t.Fatalf("%s: %x is counted as %d fields, and has %d", input.Name(), m, fields, has)
		}
		if p, ok := q.Interface().(*pb.PipelineRequest); ok && err == nil && p.Request != nil {
			if counted, _ := pipelinedOf(m, input); counted.method != methodOfPipelined(p) {
				t.Fatalf("%x is counted as %v, and decoded as %v", m, counted.method, methodOfPipelined(p))
			}
		}
		if got.most > 1 {
			beyond++
		}
	}
	protoregistry.GlobalFiles.RangeFilesByPackage("epochkv.v1", func(file protoreflect.FileDescriptor) bool {
		for i := range file.Services().Len() {
			methods := file.Services().Get(i).Methods()
			for m := range methods.Len() {
				input, n := methods.Get(m).Input(), 20
				if methods.Get(m).IsStreamingClient() || strings.HasPrefix(file.Path(), "epochkv/v1/kv") {
					n = 300
				}
				for range n {
					one(input)
				}
			}
		}
		return true
	})
	t.Logf("%d were decoded, of which %d are refused and %d have lists; %d are legal", decodedN, refused, beyond, legal)
	if decodedN < 1000 || refused < 100 || beyond < 100 || legal < 1000 {
		t.Errorf("too few of one sort: %d, %d, %d, %d", decodedN, refused, beyond, legal)
	}
}

// TestMalformedMessagesAreRefusedUndecoded: a message that the counting cannot cut to its end is one that cannot be decoded, wherever it is malformed.
func TestMalformedMessagesAreRefusedUndecoded(t *testing.T) {
	list := func(of byte) []byte { return bytes.Repeat([]byte{of<<3 | 2, 0}, countedMessageMin) }
	within := func(field byte, m []byte) []byte { return protowire.AppendBytes([]byte{field<<3 | 2}, m) }
	for _, transport := range []config.Transport{config.TransportDirect, config.TransportGRPC} {
		h := mustStart(t, func(c *config.Config) { c.Transport, c.Limits.BatchOps = transport, 1000 })
		conn := h.dial(t, grpc.WithDefaultCallOptions(grpc.ForceCodecV2(encodedCodec{pb.NewCodec()})))
		refuse := func(method string, message []byte, streams bool) {
			t.Helper()
			err := invokeEncoded(testContext(t), conn, method, message, streams)
			if status.Code(err) != codes.Internal || !strings.Contains(err.Error(), errDecode.Error()) || !strings.Contains(err.Error(), errMalformed.Error()) {
				t.Errorf("%s: %s: %v", transport, method, err)
			}
		}
		for _, malformed := range malformedFields {
			of := func(m []byte) []byte { return append(bytes.Clone(malformed), m...) }
			refuse("KVService/BatchWrite", of(list(1)), false)
			refuse("KVService/Pipeline", of(within(6, list(1))), true)
			refuse("KVService/Pipeline", within(6, of(list(1))), true)
		}
		of := func(m []byte) []byte { return append(bytes.Clone(malformedFields[0]), m...) }
		refuse("KVService/InvokeAll", of(list(1)), false)
		refuse("TransactionService/Execute", of(list(2)), false)
		refuse("TransactionService/Transact", within(5, of(list(1))), true)
		refuse("FeedService/Watch", within(1, of(list(2))), true)
		refuse("KVService/BulkLoad", of(list(1)), true)
		refuse("LockService/ReleaseLock", of(within(4, list(0))), false)
		deep := append(within(6, within(1, of(nil))), within(15, make([]byte, 2*fieldsPerOperation*1100))...) // so long that its fields are counted on all levels
		refuse("KVService/Pipeline", deep, true)
		h.mustDecodeNothing(t)
		h.mustAnswerBeforeMalformed(t, conn, of(within(6, list(1))))
	}
}

// mustAnswerBeforeMalformed checks that the requests before a malformed one are answered before the pipeline ends.
func (h *harness) mustAnswerBeforeMalformed(t *testing.T, conn *grpc.ClientConn, malformed []byte) {
	t.Helper()
	stream, err := conn.NewStream(testContext(t), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, pb.KVService_Pipeline_FullMethodName)
	if err != nil {
		t.Fatal(err)
	}
	put, err := proto.Marshal(&pb.PipelineRequest{Id: 9, Request: &pb.PipelineRequest_Put{Put: &pb.PutRequest{Key: []byte("k"), Durability: pb.Durability_DURABILITY_SYNC}}})
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range [][]byte{put, malformed} {
		if err := stream.SendMsg(&m); err != nil {
			t.Fatal(err)
		}
	}
	answer := new(pb.PipelineResponse)
	if err := stream.RecvMsg(answer); err != nil || answer.Id != 9 || answer.GetPut() == nil {
		t.Errorf("%v: got %v, %v", h.config.Transport, answer, err)
	}
	if err := stream.RecvMsg(answer); status.Code(err) != codes.Internal {
		t.Errorf("%v: %v", h.config.Transport, err)
	}
}
