package transport

import (
	"encoding/base64"
	"fmt"
	"strings"

	"golang.org/x/net/http/httpguts"
	"google.golang.org/grpc/metadata"
)

// isGRPC reports whether the content type is gRPC's, with any codec.
func (l *headerList) isGRPC() bool {
	rest, ok := strings.CutPrefix(l.contentType, contentTypeGRPC)
	return ok && (rest == "" || rest[0] == '+' || rest[0] == ';')
}

// metadata is what handlers see of the fields: all that gRPC itself does not use.
func (l *headerList) metadata() (metadata.MD, error) {
	md := make(metadata.MD, len(l.fields)+1)
	if l.authority != "" {
		md[":authority"] = []string{l.authority}
	}
	for _, f := range l.fields {
		switch f.Name {
		case "grpc-encoding", "grpc-timeout", "grpc-message-type", "grpc-message", "grpc-status", "te":
			continue
		case "host":
			if l.authority == "" {
				md[":authority"] = []string{f.Value}
			}
			continue
		}
		value := f.Value
		if strings.HasSuffix(f.Name, binarySuffix) {
			decoded, err := decodeBinary(value)
			if err != nil {
				return nil, fmt.Errorf("malformed binary metadata %.*q in header %.*q: %w", echoMax, value, echoMax, f.Name, err)
			}
			value = decoded
		}
		md[f.Name] = append(md[f.Name], value)
	}
	return md, nil
}

const binarySuffix = "-bin"

func decodeBinary(s string) (string, error) {
	encoding := base64.RawStdEncoding
	if len(s)%4 == 0 {
		encoding = base64.StdEncoding // with padding, if it needs any
	}
	b, err := encoding.DecodeString(s)
	return string(b), err
}

// appendMetadata appends the fields of metadata of an answer.
func appendMetadata(block []byte, md metadata.MD) []byte {
	for name, values := range md {
		if isReserved(name) {
			continue
		}
		for _, v := range values {
			if strings.HasSuffix(name, binarySuffix) {
				v = base64.RawStdEncoding.EncodeToString([]byte(v))
			}
			block = appendLiteral(block, name, v)
		}
	}
	return block
}

// isReserved reports whether a field is the transport's own.
func isReserved(name string) bool {
	switch name {
	case "content-type", "user-agent", "grpc-message-type", "grpc-encoding", "grpc-message", "grpc-status", "grpc-timeout", "grpc-status-details-bin", "te":
		return true
	}
	return strings.HasPrefix(name, ":")
}

// isAnswerMetadata reports whether metadata can be sent.
func isAnswerMetadata(md metadata.MD) bool {
	for name, values := range md {
		if strings.ToLower(name) != name || !httpguts.ValidHeaderFieldName(name) {
			return false
		}
		for _, v := range values {
			if !strings.HasSuffix(name, binarySuffix) && !httpguts.ValidHeaderFieldValue(v) {
				return false
			}
		}
	}
	return true
}
