package objectstore

import (
	"errors"
	"fmt"
	"io"
	"net/http"
)

// answerBytesMax bounds an answer of a bucket that is not the content of an object. A page of a list has a thousand names of 1,024 bytes at most, each
// with its size, time, checksum and owner.
const answerBytesMax = 16 << 20

// errLongAnswer means that a target has sent more than an answer of its protocol can have.
var errLongAnswer = errors.New("the answer is too long")

// boundedAnswers ends answers that are longer than any of the protocol: the client library reads lists, and what says that an upload in parts is complete,
// as a whole. What a target sends must not fill the memory of the server. The content of an object is read piece by piece, and has no bound.
type boundedAnswers struct{ http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (t boundedAnswers) RoundTrip(r *http.Request) (*http.Response, error) {
	answer, err := t.RoundTripper.RoundTrip(r)
	content := r.Method == http.MethodGet && r.URL.RawQuery == "" // with a query it asks for a list
	if err == nil && (!content || answer.StatusCode >= http.StatusMultipleChoices) {
		answer.Body = &boundedBody{answer.Body, answerBytesMax}
	}
	return answer, err
}

// boundedBody fails once it has more bytes than it may.
type boundedBody struct {
	io.ReadCloser
	left int64
}

func (b *boundedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if b.left -= int64(n); b.left < 0 {
		return 0, fmt.Errorf("%w: it has more than %d bytes", errLongAnswer, answerBytesMax)
	}
	return n, err
}
