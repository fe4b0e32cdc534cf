"""Names that no layer may have: those of modules that Python, a generated module or convgen imports.

Python looks into the folder of a script, and often into the working folder, before it looks at installed packages. So a
`json.py` there is what every `import json` gets, also torch's. The lists are fixed, instead of asked of the running
Python: a layer compiles everywhere or nowhere.
"""

from __future__ import annotations

import re

# sys.stdlib_module_names of Python 3.11 to 3.14.
_STANDARD = """
    __future__ _abc _aix_support _android_support _apple_support _ast _ast_unparse _asyncio _bisect _blake2
    _bootsubprocess _bz2 _codecs _codecs_cn _codecs_hk _codecs_iso2022 _codecs_jp _codecs_kr _codecs_tw _collections
    _collections_abc _colorize _compat_pickle _compression _contextvars _crypt _csv _ctypes _curses _curses_panel
    _datetime _dbm _decimal _elementtree _frozen_importlib _frozen_importlib_external _functools _gdbm _hashlib
    _heapq _hmac _imp _interpchannels _interpqueues _interpreters _io _ios_support _json _locale _lsprof _lzma
    _markupbase _md5 _msi _multibytecodec _multiprocessing _opcode _opcode_metadata _operator _osx_support
    _overlapped _pickle _posixshmem _posixsubprocess _py_abc _py_warnings _pydatetime _pydecimal _pyio _pylong
    _pyrepl _queue _random _remote_debugging _scproxy _sha1 _sha2 _sha256 _sha3 _sha512 _signal _sitebuiltins
    _socket _sqlite3 _sre _ssl _stat _statistics _string _strptime _struct _suggestions _symtable _sysconfig _thread
    _threading_local _tkinter _tokenize _tracemalloc _types _typing _uuid _warnings _weakref _weakrefset _winapi
    _wmi _zoneinfo _zstd abc aifc annotationlib antigravity argparse array ast asynchat asyncio asyncore atexit
    audioop base64 bdb binascii bisect builtins bz2 cProfile calendar cgi cgitb chunk cmath cmd code codecs codeop
    collections colorsys compileall compression concurrent configparser contextlib contextvars copy copyreg crypt
    csv ctypes curses dataclasses datetime dbm decimal difflib dis distutils doctest email encodings ensurepip enum
    errno faulthandler fcntl filecmp fileinput fnmatch fractions ftplib functools gc genericpath getopt getpass
    gettext glob graphlib grp gzip hashlib heapq hmac html http idlelib imaplib imghdr imp importlib inspect io
    ipaddress itertools json keyword lib2to3 linecache locale logging lzma mailbox mailcap marshal math mimetypes
    mmap modulefinder msilib msvcrt multiprocessing netrc nis nntplib nt ntpath nturl2path numbers opcode operator
    optparse os ossaudiodev pathlib pdb pickle pickletools pipes pkgutil platform plistlib poplib posix posixpath
    pprint profile pstats pty pwd py_compile pyclbr pydoc pydoc_data pyexpat queue quopri random re readline reprlib
    resource rlcompleter runpy sched secrets select selectors shelve shlex shutil signal site smtpd smtplib sndhdr
    socket socketserver spwd sqlite3 sre_compile sre_constants sre_parse ssl stat statistics string stringprep
    struct subprocess sunau symtable sys sysconfig syslog tabnanny tarfile telnetlib tempfile termios textwrap this
    threading time timeit tkinter token tokenize tomllib trace traceback tracemalloc tty turtle turtledemo types
    typing unicodedata unittest urllib uu uuid venv warnings wave weakref webbrowser winreg winsound wsgiref xdrlib
    xml xmlrpc zipapp zipfile zipimport zlib zoneinfo
"""
# Packages imported where a module is used: torch and triton, what they need, what they look for and can do without (as
# a finder that records names has seen; with a dill.py, `import torch` fails), what convgen needs, and what comes with
# these.
_PACKAGES = """
    convgen torch triton numpy
    _distutils_hack _remote_module_non_scriptable functorch torchgen filelock fsspec jinja2 markupsafe mpmath
    networkx packaging pkg_resources setuptools sympy tqdm typing_extensions
    backports colorama cuda dill flint gmpy gmpy2 hypothesis jaraco ml_dtypes more_itertools nvidia onnx onnxruntime
    opt_einsum optree pandas psutil pydot pynvml pyzstd redis scipy sklearn tabulate tensorflow torch_xla torchao
    torchaudio torchcomms torchdistx torchvision tvm xarray yaml z3 zstandard
    PIL alembic annotated_types click colorlog contourpy cycler dateutil fontTools kiwisolver mako markdown_it
    matplotlib mdurl optuna pydantic pydantic_core pygments pylab pyparsing rich ruamel sqlalchemy typing_inspection
    pytest
"""
# Attributes of every torch.nn.Module.
_MODULE = """
    T_destination _apply _backward_hooks _backward_pre_hooks _buffers _call_impl _compiled_call_impl _forward_hooks
    _forward_hooks_always_called _forward_hooks_with_kwargs _forward_pre_hooks _forward_pre_hooks_with_kwargs
    _get_backward_hooks _get_backward_pre_hooks _get_name _is_full_backward_hook _load_from_state_dict
    _load_state_dict_post_hooks _load_state_dict_pre_hooks _maybe_warn_non_full_backward_hook _modules
    _named_members _non_persistent_buffers_set _parameters _register_load_state_dict_pre_hook
    _register_state_dict_hook _replicate_for_data_parallel _save_to_state_dict _slow_forward _state_dict_hooks
    _state_dict_pre_hooks _version _wrapped_call_impl add_module apply bfloat16 buffers call_super_init children
    compile cpu cuda double dump_patches eval extra_repr float forward get_buffer get_extra_state get_parameter
    get_submodule half ipu load_state_dict modules mtia named_buffers named_children named_modules named_parameters
    parameters register_backward_hook register_buffer register_forward_hook register_forward_pre_hook
    register_full_backward_hook register_full_backward_pre_hook register_load_state_dict_post_hook
    register_load_state_dict_pre_hook register_module register_parameter register_state_dict_post_hook
    register_state_dict_pre_hook requires_grad_ set_extra_state set_submodule share_memory state_dict to to_empty
    train training type xpu zero_grad
"""
# Further attributes of a generated Network, and of each module in it.
_NETWORK = """
    _aliases _apart _as_known _as_source _buckets _buffered _calls _constants _copied_from _enter _facts _fill _frozen
    _inputs _instance _kind _kinds _known _learnt _looks _looks_at _mask _masks _mesh _misfits _mode_text _moded _modes
    _nearest _net _noise _norms _of _outside _own_mode _owner _owners _pairs _paths _refuse _refuse_whole _repeated _run
    _said _scope _scopes _seeds _taken _tied _types _wanted _wrong compute full_gradients full_state_dict graphed
    load_full reset_parameters
"""
STANDARD, PACKAGES = frozenset(_STANDARD.split()), frozenset(_PACKAGES.split())
TAKEN = STANDARD | PACKAGES
MODULE = frozenset(_MODULE.split())
NETWORK = MODULE | frozenset(_NETWORK.split())
PYTHONS = re.compile(r"__\w*__")  # attributes of every object
