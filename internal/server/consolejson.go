package server

import (
	"net/http"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/epochkv/epochkv/internal/console"
)

// computing gives its turn to a call of the console, or to one of each client that waits for it, while f makes JSON of a message or a message of
// JSON: that goes field by field, and takes several times as long as what it is for. The processors have the requests of others besides. A call has
// no turn while it is executed, where it may wait for a device or a latch, nor while its browser takes the answer.
func (c *inProcessCall) computing(f func() error) error {
	leave, err := c.server.endpoints.console.turns.enter(c.ctx, networkOf(c.ctx))
	if err != nil {
		return statusOf(c.server.drainError(err)).Err()
	}
	defer leave()
	return f()
}

// decode makes the request of the call. Its errors are those of callForConsole.
func (c *inProcessCall) decode(text []byte, request proto.Message) (err error) {
	var malformed error
	err = c.computing(func() (err error) {
		if malformed = protojson.Unmarshal(text, request); malformed == nil {
			c.request, err = proto.Marshal(request)
		}
		return err
	})
	if malformed != nil {
		return &console.CallError{Status: http.StatusBadRequest, Code: codes.InvalidArgument.String(), Message: malformed.Error()}
	}
	return errOfCall(err)
}

// smallAnswer is the size of messages that become JSON without a turn. All answers to changes are such, and are not counted while they wait for a
// browser, either: after a change was executed, no error says that it was not.
const smallAnswer = 1 << 10

// isSmall reports whether a message of the server is a small answer.
func isSmall(m any) bool {
	answer, ok := m.(encoder)
	return ok && answer.SizeVT() <= smallAnswer
}

// marshal encodes a message as the transport would, which ends what the server counts for it, and then makes JSON of it.
func (c *inProcessCall) marshal(m any) (text []byte, err error) {
	inTurn := c.computing
	if isSmall(m) {
		inTurn = func(f func() error) error { return f() }
	}
	err = inTurn(func() error {
		buffers, err := c.server.codec().Marshal(m)
		if err != nil {
			return err
		}
		defer buffers.Free()
		proto.Reset(c.answer)
		if err := proto.Unmarshal(buffers.Materialize(), c.answer); err != nil {
			return err
		}
		text, err = protojson.MarshalOptions{EmitUnpopulated: true}.Marshal(c.answer)
		return err
	})
	if charged, ok := m.(*chargedMessage); ok && err != nil {
		charged.charge.release() // it may not have been encoded
	}
	return text, err
}
