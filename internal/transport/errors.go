package transport

import (
	"errors"
	"fmt"

	"golang.org/x/net/http2"
)

// connError ends a connection: GOAWAY with the code, and the text for debugging.
type connError struct {
	code http2.ErrCode
	kind Violation // zero: that of the code
	text string
}

func (e connError) Error() string { return fmt.Sprintf("%v: %s", e.code, e.text) }

// Violation is a kind of what clients do that ends their connection or, of HeaderList, their request.
type Violation int

// The kinds. A flood has the kind of the frame that was one too many.
const (
	ViolationProtocol     Violation = iota // of HTTP/2, in another way than the following
	ViolationFlowControl                   // more bytes than a window allows, or a window above the maximum
	ViolationFrameSize                     // a frame is larger than allowed, or has a wrong length
	ViolationCompression                   // a header block cannot be decoded
	ViolationPreface                       // the connection does not begin as HTTP/2
	ViolationHandshake                     // no settings came in time
	ViolationSilence                       // pings were not answered
	ViolationHalfFrame                     // the rest of a frame did not come
	ViolationUnread                        // answers were not taken: the windows, or the socket, do not open
	ViolationHeaderList                    // the metadata of a request is larger than the limit, as of an HPACK bomb
	ViolationContinuation                  // a header block without an end
	ViolationEmptyData                     // a flood of data frames without data
	ViolationReset                         // a flood of resets
	ViolationSettings                      // a flood of settings
	ViolationPing                          // a flood of pings, or pings more often than allowed
	ViolationWindow                        // a flood of window updates
	ViolationOtherFrames                   // a flood of priorities, or of frames of unknown kinds

	Violations // how many there are
)

var violationNames = [Violations]string{
	"protocol", "flow_control", "frame_size", "compression", "preface", "handshake", "silence", "half_frame", "unread", "header_list",
	"continuation_flood", "empty_data_flood", "reset_flood", "settings_flood", "ping_flood", "window_flood", "frame_flood",
}

// String is the name of the kind in logs and metrics.
func (v Violation) String() string { return violationNames[v] }

// ViolationOf reports whether a connection was ended for what its client has sent, or not sent or not taken in time, and the kind of it.
func ViolationOf(cause error) (v Violation, ok bool) {
	var e connError
	switch {
	case errors.As(cause, &e):
		return e.violation(), true
	case errors.Is(cause, errPreface):
		return ViolationPreface, true
	case errors.Is(cause, errHandshake):
		return ViolationHandshake, true
	case errors.Is(cause, errSilent):
		return ViolationSilence, true
	case errors.Is(cause, errHalfFrame):
		return ViolationHalfFrame, true
	case errors.Is(cause, ErrUnread):
		return ViolationUnread, true
	}
	return 0, false
}

func (e connError) violation() Violation {
	switch {
	case e.kind != 0:
		return e.kind
	case e.code == http2.ErrCodeFlowControl:
		return ViolationFlowControl
	case e.code == http2.ErrCodeFrameSize:
		return ViolationFrameSize
	case e.code == http2.ErrCodeCompression:
		return ViolationCompression
	}
	return ViolationProtocol
}

func protocolError(text string) error { return connError{code: http2.ErrCodeProtocol, text: text} }

func excess(kind Violation, text string) error {
	return connError{code: http2.ErrCodeEnhanceYourCalm, kind: kind, text: text}
}

// floodOf is the kind of a flood of control frames.
func floodOf(kind http2.FrameType) Violation {
	switch kind {
	case http2.FrameRSTStream:
		return ViolationReset
	case http2.FrameSettings:
		return ViolationSettings
	case http2.FramePing:
		return ViolationPing
	case http2.FrameWindowUpdate:
		return ViolationWindow
	default:
		return ViolationOtherFrames
	}
}
