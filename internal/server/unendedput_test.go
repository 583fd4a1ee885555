package server

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"testing"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// TestRequestsThatDoNotEndAreNotExecuted: a request whose message is complete, and whose end does not
// come, is refused with a reason that says that it was not executed; and it was not, also when
// the handler of the service executes it.
func TestRequestsThatDoNotEndAreNotExecuted(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.MessageTimeout = 300 * time.Millisecond })
	put, err := (&pb.PutRequest{Key: []byte("k"), Value: []byte("v"), Durability: pb.Durability_DURABILITY_ASYNC}).MarshalVT()
	if err != nil {
		t.Fatal(err)
	}
	put = append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(put))), put...)
	for _, codec := range []string{"", "+x"} { // the second is a call of the direct transport
		c := h.dialRaw(t)
		block := bytes.Replace(requestHeaders(methodPut, "20S"), []byte("\x10application/grpc"), []byte(fmt.Sprintf("%capplication/grpc%s", 16+len(codec), codec)), 1)
		c.send(frame(frameHeaders, flagEndHeaders, 1, block))
		c.send(frame(frameData, 0, 1, put))
		if got := c.reasonOf(t, 1); got != "MESSAGE_INCOMPLETE" {
			t.Errorf("codec %q: %q", codec, got)
		}
		if h.get(t, "k").Found {
			t.Errorf("a put with codec %q was executed", codec)
		}
	}
}
