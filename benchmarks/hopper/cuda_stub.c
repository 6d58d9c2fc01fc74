// A pretend CUDA driver: it answers what Mosaic GPU's compiler asks, as an H200 would, and can run nothing.
//
//     mkdir -p STUB && gcc -shared -fPIC -o STUB/libcuda.so.1 benchmarks/hopper/cuda_stub.c

typedef unsigned long long u64;
int cuInit(unsigned f) { return 0; }
int cuDriverGetVersion(int*v) { *v=13000; return 0; }
int cuDeviceGetCount(int*c) { *c=1; return 0; }
int cuDeviceGet(int*d,int o) { *d=0; return 0; }
int cuCtxGetDevice(int*d) { *d=0; return 0; }
int cuCtxGetCurrent(void**c) { *c=(void*)8; return 0; }
int cuCtxSetCurrent(void*c) { return 0; }
int cuDevicePrimaryCtxRetain(void**c,int d) { *c=(void*)8; return 0; }
int cuDeviceGetAttribute(int*p,int a,int d) { *p= a==75?9: a==76?0: a==97?232448: a==16?132:0; return 0; }
int cuDeviceComputeCapability(int*a,int*b,int d) { *a=9;*b=0; return 0; }
int cuModuleLoadData(void**m,const void*i) { *m=(void*)16; return 0; }
int cuModuleLoadDataEx(void**m,const void*i,unsigned n,void*o,void*v) { *m=(void*)16; return 0; }
int cuModuleGetFunction(void**f,void*m,const char*n) { *f=(void*)24; return 0; }
int cuModuleUnload(void*m) { return 0; }
int cuFuncSetAttribute(void*f,int a,int v) { return 0; }
int cuFuncGetAttribute(int*p,int a,void*f) { *p=0; return 0; }
int cuModuleGetGlobal_v2(u64*p,u64*b,void*m,const char*n) { *p=32;*b=8; return 0; }
int cuGetErrorName(int e,const char**s) { *s="stub"; return 0; }
int cuGetErrorString(int e,const char**s) { *s="stub"; return 0; }
int cuMemcpyHtoD_v2(u64 d,const void*s,u64 n) { return 0; }
