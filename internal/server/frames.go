package server

import "encoding/binary"

// The part of HTTP/2 that inbound needs: connection preface, frame header, six types of frames and
// three flags.
const (
	prefaceBytes     = 24
	frameHeaderBytes = 9
	frameData        = 0
	frameHeaders     = 1
	frameReset       = 3
	frameGoAway      = 7
	frameWindow      = 8
	frameContinued   = 9
	flagEndStream    = 1
	flagEndHeaders   = 4
	flagPadded       = 8
	wordBytes        = 4         // of the increment of a window, and of the last stream of GOAWAY
	streamMax        = 1<<31 - 1 // the first GOAWAY has it: streams are still served
	connWindowFirst  = 65535
	noStream         = 2 // a client's streams are odd: gRPC subtracts data for it from the connection's window and drops it
	grpcPrefixBytes  = 5
)

// frames cuts a sequence of bytes into frames.
type frames struct {
	skip      int // bytes to skip, of the preface or of frames without interest
	header    [frameHeaderBytes]byte
	headerLen int
}

// next consumes bytes of b and returns the rest. It reports true when a header is complete.
func (f *frames) next(b []byte) (rest []byte, begins bool) {
	if f.skip > 0 {
		n := min(f.skip, len(b))
		f.skip -= n
		return b[n:], false
	}
	n := copy(f.header[f.headerLen:], b)
	if f.headerLen += n; f.headerLen < frameHeaderBytes {
		return b[n:], false
	}
	f.headerLen = 0
	return b[n:], true
}

func (f *frames) length() int {
	return int(f.header[0])<<16 | int(f.header[1])<<8 | int(f.header[2])
}

func (f *frames) kind() byte { return f.header[3] }

func (f *frames) flags() byte { return f.header[4] }

func (f *frames) stream() uint32 { return binary.BigEndian.Uint32(f.header[5:]) &^ (1 << 31) }
