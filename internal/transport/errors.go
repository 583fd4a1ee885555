package transport

import (
	"errors"
	"fmt"

	"golang.org/x/net/http2"
)

// connError ends a connection: GOAWAY with the code, and the text for debugging.
type connError struct {
	code http2.ErrCode
	text string
}

func (e connError) Error() string { return fmt.Sprintf("%v: %s", e.code, e.text) }

// Violation reports whether a connection was ended for what its client has sent, or not sent in time,
// and the kind of it, of which there are few.
func Violation(cause error) (kind string, ok bool) {
	var e connError
	switch {
	case errors.As(cause, &e):
		return e.code.String(), true
	case errors.Is(cause, errPreface):
		return "preface", true
	case errors.Is(cause, errHandshake):
		return "handshake", true
	case errors.Is(cause, errSilent):
		return "silence", true
	}
	return "", false
}

func protocolError(text string) error { return connError{code: http2.ErrCodeProtocol, text: text} }

func excess(text string) error { return connError{code: http2.ErrCodeEnhanceYourCalm, text: text} }
