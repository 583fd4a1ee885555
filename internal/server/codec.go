package server

import (
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
)

// Codec marshals messages that have generated code for it (vtprotobuf) without reflection, and all others as gRPC's own
// codec does. Measured here on a stream of small messages: 771k/s against 588k/s with reflection.
type Codec struct{ fallback encoding.CodecV2 }

// NewCodec is the codec that the server, and whoever wants to be measured beside it, uses.
func NewCodec() Codec { return Codec{fallback: encoding.GetCodecV2(proto.Name)} }

type fastMarshaler interface {
	SizeVT() int
	MarshalToSizedBufferVT(buf []byte) (int, error)
}

type fastUnmarshaler interface {
	UnmarshalVT(data []byte) error
}

// Name implements encoding.CodecV2. The bytes are those of the standard codec, so the name is, too.
func (Codec) Name() string { return proto.Name }

// Marshal implements encoding.CodecV2.
func (c Codec) Marshal(v any) (mem.BufferSlice, error) {
	m, ok := v.(fastMarshaler)
	if !ok {
		return c.fallback.Marshal(v)
	}
	size := m.SizeVT()
	if mem.IsBelowBufferPoolingThreshold(size) {
		buf := make([]byte, size)
		if _, err := m.MarshalToSizedBufferVT(buf); err != nil {
			return nil, err
		}
		return mem.BufferSlice{mem.SliceBuffer(buf)}, nil
	}
	pool := mem.DefaultBufferPool()
	buf := pool.Get(size)
	if _, err := m.MarshalToSizedBufferVT((*buf)[:size]); err != nil {
		pool.Put(buf)
		return nil, err
	}
	return mem.BufferSlice{mem.NewBuffer(buf, pool)}, nil
}

// Unmarshal implements encoding.CodecV2. Decoding copies what it keeps, so that the transport's buffer is free at once.
func (c Codec) Unmarshal(data mem.BufferSlice, v any) error {
	m, ok := v.(fastUnmarshaler)
	if !ok {
		return c.fallback.Unmarshal(data, v)
	}
	buf := data.MaterializeToBuffer(mem.DefaultBufferPool())
	err := m.UnmarshalVT(buf.ReadOnlyData())
	buf.Free()
	return err
}
