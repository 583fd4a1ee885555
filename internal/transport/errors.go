package transport

import (
	"fmt"

	"golang.org/x/net/http2"
)

// connError ends a connection: GOAWAY with the code, and the text for debugging.
type connError struct {
	code http2.ErrCode
	text string
}

func (e connError) Error() string { return fmt.Sprintf("%v: %s", e.code, e.text) }

func protocolError(text string) error { return connError{code: http2.ErrCodeProtocol, text: text} }

func excess(text string) error { return connError{code: http2.ErrCodeEnhanceYourCalm, text: text} }
