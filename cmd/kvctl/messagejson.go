package main

import (
	"encoding/json"
	"strconv"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// appendMessageJSON appends a message in the one dialect of kvctl: every field under its name in the contract, numbers as numbers, and bytes as
// NAME or, if they are no UTF-8, as NAME_base64. The JSON of protobuf has 64-bit numbers as strings, and all bytes as base64.
func appendMessageJSON(dst []byte, m protoreflect.Message, asHex bool) ([]byte, error) {
	switch m.Descriptor().FullName() {
	case "google.protobuf.Duration", "google.protobuf.Timestamp":
		text, err := protojson.Marshal(m.Interface())
		return append(dst, text...), err
	}
	dst = append(dst, '{')
	var err error
	for i := range m.Descriptor().Fields().Len() {
		f := m.Descriptor().Fields().Get(i)
		if f.ContainingOneof() != nil && !m.Has(f) {
			continue
		}
		if dst[len(dst)-1] != '{' {
			dst = append(dst, ',')
		}
		if dst, err = appendFieldJSON(dst, f, m, asHex); err != nil {
			return dst, err
		}
	}
	return append(dst, '}'), nil
}

func appendFieldJSON(dst []byte, f protoreflect.FieldDescriptor, m protoreflect.Message, asHex bool) ([]byte, error) {
	name, value := string(f.Name()), m.Get(f)
	if f.Kind() == protoreflect.BytesKind && !f.IsList() {
		return appendJSONField(dst, name, value.Bytes(), asHex), nil
	}
	dst = append(strconv.AppendQuote(dst, name), ':')
	switch {
	case f.IsList():
		var err error
		dst = append(dst, '[')
		for i := range value.List().Len() {
			if i > 0 {
				dst = append(dst, ',')
			}
			if dst, err = appendValueJSON(dst, f, value.List().Get(i), asHex); err != nil {
				return dst, err
			}
		}
		return append(dst, ']'), nil
	case f.Message() != nil && !m.Has(f):
		return append(dst, "null"...), nil
	}
	return appendValueJSON(dst, f, value, asHex)
}

// appendValueJSON appends one value of a field. Bytes in lists have no name, and are text or base64.
func appendValueJSON(dst []byte, f protoreflect.FieldDescriptor, value protoreflect.Value, asHex bool) ([]byte, error) {
	switch {
	case f.Message() != nil:
		return appendMessageJSON(dst, value.Message(), asHex)
	case f.Enum() != nil:
		if v := f.Enum().Values().ByNumber(value.Enum()); v != nil {
			return strconv.AppendQuote(dst, string(v.Name())), nil
		}
		return strconv.AppendInt(dst, int64(value.Enum()), 10), nil
	}
	text, err := json.Marshal(value.Interface()) // bytes as base64, all others as they are
	return append(dst, text...), err
}
