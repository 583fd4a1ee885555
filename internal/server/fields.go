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
	n, err := countFields(message, of, most)
	if n > most {
		return &mvcc.LimitError{What: "batch fields", Limit: most, Got: n}
	}
	return err
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

// messageIn is the descriptor of the messages in a field; nil if it has none, or is not known.
func messageIn(of protoreflect.MessageDescriptor, field int) protoreflect.MessageDescriptor {
	if f := of.Fields().ByNumber(protowire.Number(field)); f != nil {
		return f.Message()
	}
	return nil
}

// countFields is the number of fields of a message and of the messages in it. It stops above most.
// No message of the API contains one of its own kind, which bounds the depth.
func countFields(message []byte, of protoreflect.MessageDescriptor, most int) (n int, err error) {
	for len(message) > 0 && n <= most {
		field, payload, rest := cutField(message)
		if rest == nil {
			return n, errMalformed
		}
		n++
		if len(payload) > 0 {
			if inner := messageIn(of, field); inner != nil {
				more, err := countFields(payload, inner, most-n)
				if n += more; err != nil {
					return n, err
				}
			}
		}
		message = rest
	}
	return n, nil
}
