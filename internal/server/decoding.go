package server

import (
	"sync"
	"sync/atomic"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// decoding bounds the memory of requests that gRPC is decoding or has decoded and that are not yet
// admitted or refused. Decoded, a request of two bytes for each operation takes hundreds of times as
// much, and gRPC decodes it before the server's code sees it: as many as there are streams could be
// decoded at once, only to be refused. So the codec counts what a request will take, and waits until
// there is room. The room is given back when the request is admitted or refused, which comes next and
// waits for nothing: a unary request is decoded after its end has come. So begin waits only for requests
// that are being decoded. A request that is alone is decoded whatever its size.
type decoding struct {
	count atomic.Int64 // of held: most requests are too small to be counted, and must find that out cheaply

	mu      sync.Mutex // a leaf; guards what follows
	limit   int64
	used    int64
	held    map[any]int64 // bytes of each decoded request
	waiting []*waitingDecode
}

// waitingDecode is a request that waits for room.
type waitingDecode struct {
	request any
	bytes   int64
	ready   chan struct{}
}

// decodingPart is the part of --max-inflight-bytes for requests that are not admitted yet. Decoding is
// faster than the network, so few of them are ever under way.
const decodingPart = 16

func (d *decoding) init(inflight int64) {
	d.limit, d.held = inflight/decodingPart, map[any]int64{}
}

// begin waits until a request of that many bytes may be decoded.
func (d *decoding) begin(request any, bytes int) {
	d.mu.Lock()
	w := &waitingDecode{request: request, bytes: int64(bytes), ready: make(chan struct{})}
	d.waiting = append(d.waiting, w)
	d.admitLocked()
	d.mu.Unlock()
	<-w.ready
}

// admitLocked lets requests be decoded in the order in which they came, as far as there is room.
func (d *decoding) admitLocked() {
	for len(d.waiting) > 0 && (d.used == 0 || d.used+d.waiting[0].bytes <= d.limit) {
		w := d.waiting[0]
		d.waiting[0], d.waiting = nil, d.waiting[1:]
		d.used += w.bytes
		d.held[w.request] = w.bytes
		d.count.Add(1)
		close(w.ready)
	}
}

// end says that a request was admitted, refused or not decoded at all. For a request that was not
// counted it does nothing.
func (d *decoding) end(request any) {
	if d.count.Load() == 0 {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if n, ok := d.held[request]; ok {
		delete(d.held, request)
		d.count.Add(-1)
		d.used -= n
		d.admitLocked()
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
func decodedBytes(message []byte, request any) (c contents, bytes int) {
	switch request.(type) {
	case *pipelineRequest, *pb.TransactRequest:
		c = pipelinedOf(message).contents
		return c, c.bytes(message, kindWriteAndRead)
	case *pb.WatchRequest:
		c = pipelinedOf(message).contents
		return c, c.bytes(message, kindRead) + numberBytes*len(message)
	}
	c, kind := contentsOf(message), kindWriteAndRead
	if method, known := methodOf(request); known {
		kind = kindOf(method)
	}
	if bytes = c.bytes(message, kind); !carriesOperations(request) {
		bytes += numberBytes * len(message)
	}
	return c, bytes
}

// numberBytes is what a number of one byte takes once it is decoded.
const numberBytes = 8
