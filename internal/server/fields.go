package server

import (
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// To decode a field takes up to 200 ns, and two bytes may be all that is encoded of it: a message of 64 MiB that has the fields
// of one operation over and over, or such as no version of the program knows, takes ten seconds. So the fields of long messages are
// counted before, on all levels: 5 ns for each.

// fieldsPerOperation is more than the fields that an operation of any kind has in all lists of its request together.
const fieldsPerOperation = 32

// checkFields refuses a message that has more fields than the largest request needs.
func checkFields(message []byte, of protoreflect.MessageDescriptor, limits *mvcc.Limits) error {
	most := fieldsPerOperation*limits.BatchOps + fieldsCounted
	if len(message)/2 <= most || of == nil {
		return nil
	}
	if n := countFields(message, of, most); n > most {
		return &mvcc.LimitError{What: "batch fields", Limit: most, Got: n}
	}
	return nil
}

var pipelineDescriptor = (*pb.PipelineRequest)(nil).ProtoReflect().Descriptor()

// descriptorOf is the descriptor of a message that the codec decodes into; nil if there is none.
func descriptorOf(v any) protoreflect.MessageDescriptor {
	switch m := v.(type) {
	case *pipelineRequest:
		return pipelineDescriptor
	case proto.Message:
		return m.ProtoReflect().Descriptor()
	}
	return nil
}

// countFields is the number of fields of a message and of the messages in it. It stops above most, and where the message cannot be decoded.
// No message of the API contains one of its own kind, which bounds the depth.
func countFields(message []byte, of protoreflect.MessageDescriptor, most int) int {
	n := 0
	for len(message) > 0 && n <= most {
		number, payload, rest := cutField(message)
		if rest == nil {
			break
		}
		n++
		if len(payload) > 1 {
			if f := of.Fields().ByNumber(protowire.Number(number)); f != nil && f.Message() != nil {
				n += countFields(payload, f.Message(), most-n)
			}
		}
		message = rest
	}
	return n
}
