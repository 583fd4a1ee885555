package epochkvv1

import (
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
)

// Codec is a gRPC codec that marshals the messages of KVService and TransactionService without
// reflection, and all others, those of AdminService included, as gRPC's own codec does. It writes
// the same bytes as the standard codec, so that client and server may use it independently.
type Codec struct{ fallback encoding.CodecV2 }

// NewCodec makes a Codec, for grpc.ForceCodecV2 or grpc.ForceServerCodecV2.
func NewCodec() Codec { return Codec{fallback: encoding.GetCodecV2(proto.Name)} }

type fastMarshaler interface {
	SizeVT() int
	MarshalToSizedBufferVT(buf []byte) (int, error)
}

// pooled is a message that brings the pool for the buffer of its encoding, and so learns when the
// transport is done with it.
type pooled interface{ BufferPool() mem.BufferPool }

// givenBackMin is the capacity of the smallest buffer that gRPC gives back to its pool.
const givenBackMin = 1<<10 + 1

type fastUnmarshaler interface{ UnmarshalVT(data []byte) error }

// Name is the standard codec's name, because the bytes are the same.
func (Codec) Name() string { return proto.Name }

// Marshal implements encoding.CodecV2.
func (c Codec) Marshal(v any) (mem.BufferSlice, error) {
	m, ok := v.(fastMarshaler)
	if !ok {
		return c.fallback.Marshal(v)
	}
	size, pool, least := m.SizeVT(), Buffers, 0
	if p, ok := v.(pooled); ok {
		pool, least = p.BufferPool(), givenBackMin
	} else if mem.IsBelowBufferPoolingThreshold(size) {
		buf := make([]byte, size)
		_, err := m.MarshalToSizedBufferVT(buf)
		return mem.BufferSlice{mem.SliceBuffer(buf)}, err
	}
	buf := pool.Get(max(size, least))
	*buf = (*buf)[:size]
	if _, err := m.MarshalToSizedBufferVT(*buf); err != nil {
		pool.Put(buf)
		return nil, err
	}
	return mem.BufferSlice{mem.NewBuffer(buf, pool)}, nil
}

// Unmarshal implements encoding.CodecV2. It copies what the message keeps, so that the transport's
// buffers are free at once. The message must be empty: fields add to what it has.
func (c Codec) Unmarshal(data mem.BufferSlice, v any) error {
	m, ok := v.(fastUnmarshaler)
	if !ok {
		return c.fallback.Unmarshal(data, v)
	}
	buf := data.MaterializeToBuffer(Buffers)
	defer buf.Free()
	if changes, ok := v.(*WatchResponse); ok {
		return changes.unmarshalResponse(buf.ReadOnlyData())
	}
	return m.UnmarshalVT(buf.ReadOnlyData())
}
