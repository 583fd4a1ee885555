package server

import (
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// setAll gives every field of a message a value other than its default, so that a field that is added later is tested, too.
func setAll(m protoreflect.Message, depth int) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		switch {
		case f.IsMap():
		case f.IsList() && f.Message() != nil:
			if depth > 0 {
				e := m.Mutable(f).List().AppendMutable()
				setAll(e.Message(), depth-1)
			}
		case f.IsList():
			m.Mutable(f).List().Append(someValue(f))
		case f.Message() != nil:
			if depth > 0 {
				setAll(m.Mutable(f).Message(), depth-1)
			}
		default:
			m.Set(f, someValue(f))
		}
	}
}

func someValue(f protoreflect.FieldDescriptor) protoreflect.Value {
	switch f.Kind() {
	case protoreflect.BytesKind:
		return protoreflect.ValueOfBytes([]byte("xyz"))
	case protoreflect.StringKind:
		return protoreflect.ValueOfString("xyz")
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(true)
	case protoreflect.EnumKind:
		return protoreflect.ValueOfEnum(1)
	case protoreflect.Uint64Kind, protoreflect.Fixed64Kind:
		return protoreflect.ValueOfUint64(7)
	case protoreflect.Uint32Kind, protoreflect.Fixed32Kind:
		return protoreflect.ValueOfUint32(7)
	case protoreflect.Int64Kind, protoreflect.Sint64Kind:
		return protoreflect.ValueOfInt64(7)
	}
	return protoreflect.ValueOfInt32(7)
}

// withUnknown is a message of a newer client: it has a field that this version does not know.
func withUnknown[M proto.Message](m M) M {
	m.ProtoReflect().SetUnknown(protowire.AppendBytes(protowire.AppendTag(nil, 1000, protowire.BytesType), []byte("of a newer version")))
	return m
}

func mustMarshal(t *testing.T, m proto.Message) []byte {
	t.Helper()
	data, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// TestReusedBatchesKeepAsMuchAsFewMessages: the buffers of each mutation are used again, and must not become those of the largest one that a
// client has ever sent in its place.
func TestReusedBatchesKeepAsMuchAsFewMessages(t *testing.T) {
	const places, large = 80, 30 << 10
	var r pipelineRequest
	r.init()
	for i := range places {
		batch := new(pb.BatchWriteRequest)
		for place := range places {
			m := &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: []byte("k"), Value: []byte("v")}
			if place == i {
				m.Value = make([]byte, large)
			}
			batch.Mutations = append(batch.Mutations, m)
		}
		data := mustMarshal(t, &pb.PipelineRequest{Request: &pb.PipelineRequest_BatchWrite{BatchWrite: batch}})
		if err := r.decode(data, len(data)); err != nil {
			t.Fatal(err)
		}
	}
	kept, list := 0, r.batchWrite.BatchWrite.Mutations
	for _, m := range list[:cap(list)] {
		if m != nil {
			kept += cap(m.Value)
		}
	}
	if kept > 2*(resetEvery+large) {
		t.Errorf("%d bytes are kept", kept)
	}
}

// TestReusedRequestsForgetEveryField decodes a request with all fields, and then one with none, into the same message: of a
// pipeline, and of a lane of the direct transport. With a precondition and without one a put takes different ways.
func TestReusedRequestsForgetEveryField(t *testing.T) {
	fields := (&pb.PipelineRequest{}).ProtoReflect().Descriptor().Oneofs().ByName("request").Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		for depth := range 3 {
			full, empty := new(pb.PipelineRequest), new(pb.PipelineRequest)
			full.Id = 1
			setAll(full.ProtoReflect().Mutable(f).Message(), depth)
			empty.ProtoReflect().Mutable(f)
			var r pipelineRequest
			r.init()
			newer := proto.CloneOf(empty)
			withUnknown(newer.ProtoReflect().Mutable(f).Message().Interface())
			for _, m := range []*pb.PipelineRequest{full, empty, newer, newer, full, newer, empty} {
				if err := r.UnmarshalVT(mustMarshal(t, m)); err != nil {
					t.Fatal(err)
				}
				if !proto.Equal(&r.msg, m) {
					t.Errorf("%s: read %v, sent %v", f.Name(), &r.msg, m)
				}
			}
		}
	}
	lane := new(lane)
	for method, m := range map[telemetry.Method]proto.Message{
		telemetry.MethodGet: &lane.get, telemetry.MethodPut: &lane.put,
		telemetry.MethodDelete: &lane.delete, telemetry.MethodBatchWrite: &lane.batch,
	} {
		for depth := range 3 {
			full := m.ProtoReflect().New()
			setAll(full, depth)
			empty, newer := m.ProtoReflect().New().Interface(), withUnknown(m.ProtoReflect().New().Interface())
			for _, sent := range []proto.Message{full.Interface(), empty, newer, newer, full.Interface(), newer, empty} {
				if _, err := lane.decode(method, mustMarshal(t, sent)); err != nil {
					t.Fatal(err)
				}
				if !proto.Equal(m, sent) {
					t.Errorf("a lane read %v, sent %v", m, sent)
				}
			}
		}
	}
	var kept keepAliveMessages
	newer := withUnknown(&pb.KeepAliveRequest{Ids: []uint64{3}})
	for _, sent := range []*pb.KeepAliveRequest{{Ids: []uint64{1, 2}}, newer, newer, {}} {
		if err := kept.decode(mustMarshal(t, sent)); err != nil {
			t.Fatal(err)
		}
		if !proto.Equal(&kept.in, sent) {
			t.Errorf("a stream of keep-alives read %v, sent %v", &kept.in, sent)
		}
	}
}
