// Package epochkvv1 is the wire contract of EpochKV: messages, services and error reasons.
//
// The .proto files beside this one are the reference; *.pb.go is generated from them. Messages also
// have MarshalVT and UnmarshalVT, which avoid reflection and which Codec puts to use, and those of
// the hot paths have pools (GetRequestFromVTPool, ReturnToVTPool).
package epochkvv1

import (
	"encoding/base64"
	"strings"
	"unicode/utf8"
)

// ErrorDomain is the domain of every google.rpc.ErrorInfo that the server sends.
const ErrorDomain = "epochkv"

// EarlierRequests is the entry in the metadata of an error that ends a stream because of a later
// message. Its value, EarlierUnknown, says that earlier requests without an answer may have been
// executed.
const (
	EarlierRequests = "earlier_requests"
	EarlierUnknown  = "unknown"
)

const reasonPrefix = "ERROR_REASON_"

// Reason is the stable string in google.rpc.ErrorInfo: the value's name without its prefix.
func (x ErrorReason) Reason() string { return strings.TrimPrefix(x.String(), reasonPrefix) }

// ParseReason is the inverse of Reason. A reason of a newer server is ERROR_REASON_UNSPECIFIED.
func ParseReason(reason string) ErrorReason {
	return ErrorReason(ErrorReason_value[reasonPrefix+reason])
}

// base64Suffix marks the name of an entry of metadata whose value is base64.
const base64Suffix = "_base64"

// SetBytes puts bytes into metadata: under their name if they are valid UTF-8, and otherwise as base64 under NAME_base64.
func SetBytes(metadata map[string]string, name string, value []byte) {
	if utf8.Valid(value) {
		metadata[name] = string(value)
		return
	}
	metadata[name+base64Suffix] = base64.StdEncoding.EncodeToString(value)
}

// Bytes returns what SetBytes has put into metadata under a name.
func Bytes(metadata map[string]string, name string) (value []byte, ok bool) {
	if text, ok := metadata[name]; ok {
		return []byte(text), true
	}
	text, ok := metadata[name+base64Suffix]
	if !ok {
		return nil, false
	}
	value, err := base64.StdEncoding.DecodeString(text)
	return value, err == nil
}
