package transport

import (
	"bytes"
	"runtime"
	"testing"
	"weak"

	"golang.org/x/net/http2/hpack"
)

// TestDecodedHeadersKeepNoInputBuffer: it has 32 KiB, and each connection would keep one for as long as it sends no other headers.
func TestDecodedHeadersKeepNoInputBuffer(t *testing.T) {
	var block bytes.Buffer
	encoder := hpack.NewEncoder(&block)
	for _, f := range []hpack.HeaderField{{Name: ":method", Value: "POST"}, {Name: ":scheme", Value: "http"}, {Name: ":path", Value: "/a/B"}} {
		if err := encoder.WriteField(f); err != nil {
			t.Fatal(err)
		}
	}
	h := new(headers)
	h.init(8 << 10)
	buf := new([inputBytes]byte)
	n := copy(buf[:], block.Bytes())
	kept := weak.Make(buf)
	l, err := h.decode(buf[:n:n])
	if err != nil || !l.isRequest() || l.path != "/a/B" || l.method != "POST" {
		t.Fatalf("%+v, %v", l, err)
	}
	runtime.GC()
	if kept.Value() != nil {
		t.Error("the buffer is kept")
	}
	runtime.KeepAlive(h)
}
