package server

import (
	"context"
	"math"
	"sync"
	"sync/atomic"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/fairqueue"
)

// decoding bounds the memory of requests that gRPC is decoding or has decoded and that are not yet
// admitted or refused. Decoded, a request of two bytes for each operation takes hundreds of times as
// much, and gRPC decodes it before the server's code sees it: as many as there are streams could be
// decoded at once, only to be refused. So the codec counts what a request will take, and waits until
// there is room. The room is given back when the request is admitted or refused, which comes next and
// waits for nothing: a unary request is decoded after its end has come. So begin waits only for requests
// that are being decoded, and no longer than the client: when it resets the stream, the transport counts
// the encoded message no more. A request that is alone is decoded whatever its size. The largest take a second, and so
// there are three lines, each with its own room: smaller requests never wait for larger ones. In a line clients have turns.
type decoding struct {
	count atomic.Int64 // of held: most requests are too small to be counted, and must find that out cheaply

	mu    sync.Mutex // a leaf; guards what follows
	lines [3]decodingLine
	held  map[any]decoded
}

// decodingLine has room for so many bytes of decoded requests, of which each takes up to most. Those of a client are decoded in the order in which they
// came.
type decodingLine struct {
	most, limit, used int64
	waiting           fairqueue.Queue[*streamClient, *waitingDecode]
}

// fits reports whether there is room for a request. One that is alone has any size.
func (l *decodingLine) fits(bytes int64) bool { return l.used == 0 || l.used+bytes <= l.limit }

// decoded is a request that a line has let in.
type decoded struct {
	line  *decodingLine
	bytes int64
}

// waitingDecode is a request that waits for room.
type waitingDecode struct {
	request any
	bytes   int64
	ready   chan struct{} // closed when it is counted
}

// decodingPart is the part of --max-inflight-bytes for requests that are not admitted yet. Decoding is
// faster than the network, so few of them are ever under way.
const decodingPart = 16

// decodedSmallMax is what a request of the first line takes at most. It is decoded within milliseconds. One of the second takes a quarter of the
// room at most, so that several are decoded at once.
const decodedSmallMax = 256 << 10

func (d *decoding) init(inflight int64) {
	room := inflight / decodingPart
	for i, most := range [...]int64{decodedSmallMax, room / 4, math.MaxInt64} {
		d.lines[i] = decodingLine{most: most, limit: room}
	}
	d.held = map[any]decoded{}
}

// begin waits until a request of that many bytes may be decoded. If its context ends before, the request is not counted, and the
// error is that of the context.
func (d *decoding) begin(ctx context.Context, request any, bytes int) error {
	d.mu.Lock()
	w := &waitingDecode{request: request, bytes: int64(bytes)}
	line := &d.lines[0]
	for i := 1; w.bytes > line.most; i++ {
		line = &d.lines[i]
	}
	if line.waiting.Len() == 0 && line.fits(w.bytes) {
		d.countLocked(line, w)
		d.mu.Unlock()
		return nil
	}
	w.ready = make(chan struct{})
	place := line.waiting.Push(connectionOf(ctx).client(), w)
	d.mu.Unlock()
	select {
	case <-w.ready:
		return nil
	case <-ctx.Done():
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if line.waiting.Remove(place) {
		d.admitLocked(line) // those after it
	} else {
		d.endLocked(request)
	}
	return ctx.Err()
}

// admitLocked lets requests of a line be decoded as far as there is room.
func (d *decoding) admitLocked(line *decodingLine) {
	for next := line.waiting.Next(); next != nil && line.fits(next.Value.bytes); next = line.waiting.Next() {
		d.countLocked(line, next.Value)
		close(line.waiting.Pop().ready)
	}
}

func (d *decoding) countLocked(line *decodingLine, w *waitingDecode) {
	line.used += w.bytes
	d.held[w.request] = decoded{line, w.bytes}
	d.count.Add(1)
}

// end says that a request was admitted, refused or not decoded at all. For a request that was not
// counted it does nothing.
func (d *decoding) end(request any) {
	if d.count.Load() == 0 {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.endLocked(request)
}

func (d *decoding) endLocked(request any) {
	if h, ok := d.held[request]; ok {
		delete(d.held, request)
		d.count.Add(-1)
		h.line.used -= h.bytes
		d.admitLocked(h.line)
	}
}

// endsAtAdmission reports whether the code that admits a request calls end, and nothing waits between.
// Others carry no operations, and end when they are decoded.
func endsAtAdmission(request any) bool {
	switch request.(type) {
	case *pipelineRequest, *pb.TransactRequest:
		return true
	}
	_, known := methodOf(request)
	return known
}

// decodedBytes is about what an encoded request will take, and what is in it.
func decodedBytes(message []byte, request any) (c contents, bytes int, err error) {
	switch request.(type) {
	case *pipelineRequest, *pb.TransactRequest:
		p, err := pipelinedOf(message, descriptorOf(request))
		return p.contents, p.bytes(message, kindWriteAndRead), err
	case *pb.WatchRequest:
		p, err := pipelinedOf(message, descriptorOf(request))
		return p.contents, p.bytes(message, kindRead) + numberBytes*len(message), err
	}
	kind := kindWriteAndRead
	c, err = contentsOf(message)
	if method, known := methodOf(request); known {
		kind = kindOf(method)
	}
	if bytes = c.bytes(message, kind); !carriesOperations(request) {
		bytes += numberBytes * len(message)
	}
	return c, bytes, err
}

// numberBytes is what a number of one byte takes once it is decoded.
const numberBytes = 8
