// Package epochkvv1 is the wire contract of EpochKV: messages, services and error reasons.
//
// The .proto files beside this one are the reference; *.pb.go is generated from them. Messages also
// have MarshalVT and UnmarshalVT, which avoid reflection and which Codec puts to use, and those of
// the hot paths have pools (GetRequestFromVTPool, ReturnToVTPool).
package epochkvv1

import "strings"

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
